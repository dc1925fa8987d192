"""Ctrl-C at a time of our choosing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back: it raises KeyboardInterrupt where the function that this yields is called.

    A second Ctrl-C before that raises at once. Nothing changes outside the main thread, or where the
    application has its own handler: there Ctrl-C is that handler's business.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    came = False

    def hold(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    def check() -> None:
        nonlocal came
        if came:
            came = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
        check()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
