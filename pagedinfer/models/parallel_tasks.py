"""A few long tasks side by side, which an interrupt does not wait for."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence


def run_in_parallel(tasks: Sequence[Callable[[], object]], num_threads: int) -> None:
    """Runs all tasks and returns when they have ended; raises the first error that one raises.

    The threads are daemons: on Ctrl-C or an error the caller goes on at once, tasks that have not begun never
    do, and the others end with the process. A thread pool of the standard library would wait for them.
    """
    waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()
    for task in tasks:
        waiting.put(task)

    def work() -> None:
        while not stopped.is_set():
            try:
                task = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                task()
            except BaseException as error:
                ended.put(error)
            else:
                ended.put(None)

    for _ in range(min(num_threads, len(tasks))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in tasks:
            error = ended.get()
            if error is not None:
                raise error
    finally:
        stopped.set()
