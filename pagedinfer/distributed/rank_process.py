"""A rank: a process with a worker of its own, which executes the batches that the engine sends it.

Started as `python -m pagedinfer.distributed.rank_process DATA CONTROL`, the numbers of two open sockets. It
ends when the engine closes them, or is no more.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from typing import NoReturn

import torch
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from pagedinfer.distributed.channel import Channel, Kind
from pagedinfer.distributed.messages import (
    BatchDecoder,
    Failure,
    Ready,
    Start,
    decode_start,
    encode,
    encode_result,
)
from pagedinfer.distributed.peer_all_reduce import most_bytes
from pagedinfer.distributed.rank_monitor import RankMonitor
from pagedinfer.distributed.torch_group import TorchGroup, join
from pagedinfer.engine.batch import Batch
from pagedinfer.logging import LEVEL_VARIABLE, configure
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner.step_result import StepResult
from pagedinfer.runner.worker import Worker


def main() -> None:
    """The life of a rank."""
    # A Ctrl-C reaches all processes of a terminal; what follows from it is the engine's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    data, control = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:3])
    monitor = RankMonitor(control)
    try:
        kind, contents = data.receive()
        if kind != Kind.START:
            raise ValueError(f"the first message must be {Kind.START!r}, got {kind!r}")
        _serve(decode_start(contents), data, control, monitor)
    except EOFError:  # the engine is closed or gone
        return
    except BaseException as error:
        _end(control, error)


def _end(control: Channel, error: BaseException) -> NoReturn:
    """Tells the engine what has gone wrong, and ends the process."""
    failure = Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    try:
        control.send(Kind.FAILURE, encode(failure))
    except OSError:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(1)  # other threads, NCCL's too, may never end


def _serve(start: Start, data: Channel, control: Channel, monitor: RankMonitor) -> None:
    if start.rank:
        os.environ.setdefault(LEVEL_VARIABLE, "WARNING")  # what all say is said once
    configure()
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(start.num_threads)
    device = torch.device("cpu")
    if start.device == "cuda":
        device = torch.device("cuda", start.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    group = _join(start, device)
    monitor.group = group
    config = ModelConfig.from_pretrained(start.folder)
    worker = Worker(start.config, config, num_known_tokens=start.num_known_tokens, group=group)
    gc.collect()
    gc.freeze()  # a collection passes over the large imports and the model, and takes no part of a step
    data.send(Kind.READY, encode(_describe(worker)))
    sender = _ResultSender(worker, data, control) if start.rank == 0 else None
    _execute_all(worker, data, monitor, sender)
    worker.close()
    sys.stderr.flush()
    os._exit(0)  # what is left ends with the process; torn down one by one it takes seconds


def _join(start: Start, device: torch.device) -> TorchGroup:
    if os.sep in start.store:  # one machine: what its ranks tell each other stays in it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        store: FileStore | TCPStore = FileStore(start.store, start.num_ranks)
    else:
        host, _, port = start.store.rpartition(":")
        store = TCPStore(host, int(port), start.num_ranks, is_master=False)
    return join(
        start.rank,
        start.num_ranks,
        store,
        device,
        nccl=start.nccl,
        num_local_ranks=start.num_local_ranks,
        peer_bytes=most_bytes(start.num_ranks),
    )


def _describe(worker: Worker) -> Ready:
    return Ready(
        max_num_seqs=worker.max_num_seqs,
        max_num_batched_tokens=worker.max_num_batched_tokens,
        max_model_len=worker.max_model_len,
        num_blocks=worker.num_blocks,
        num_cpu_blocks=worker.num_cpu_blocks,
        block_bytes=worker.block_bytes,
        dtype=str(worker.dtype).removeprefix("torch."),
        cascade_attention=worker.cascade_attention,
    )


def _execute_all(worker: Worker, data: Channel, monitor: RankMonitor, sender: _ResultSender | None) -> None:
    """Executes batch after batch, until the engine closes the channel."""
    decoder = BatchDecoder()
    while True:
        try:
            kind, contents = data.receive()
        except EOFError:
            return
        if kind != Kind.STEP:
            raise ValueError(f"a rank that is ready takes {Kind.STEP!r}, got {kind!r}")
        batch = decoder.decode(contents)
        monitor.begin_step(batch.step)
        if sender is not None:
            sender.execute(batch)
        else:
            worker.execute(batch)
            worker.take_swap_timings()
        monitor.end_step()


class _ResultSender:
    """Executes steps and sends what they drew: from a GPU by a thread, so that the next step can begin."""

    def __init__(self, worker: Worker, data: Channel, control: Channel) -> None:
        self._worker = worker
        self._data = data
        self._control = control
        self._steps: queue.SimpleQueue[tuple[int, StepResult]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of the worker
        if worker.device.type == "cuda":
            threading.Thread(target=self._run, name="results", daemon=True).start()

    def execute(self, batch: Batch) -> None:
        """Starts a step. Results go out in the order of these calls."""
        with self._lock:
            step = batch.step, self._worker.execute(batch)
        if self._worker.device.type == "cuda":
            self._steps.put(step)
        else:
            self._send(*step)

    def _run(self) -> None:
        try:
            while True:
                self._send(*self._steps.get())
        except BaseException as error:
            _end(self._control, error)

    def _send(self, number: int, step: StepResult) -> None:
        step.wait()
        with self._lock:
            output, timings = step.result(), self._worker.take_swap_timings()
        self._data.send(Kind.RESULT, encode_result(number, output, timings))


if __name__ == "__main__":
    main()
