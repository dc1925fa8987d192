"""Captures CUDA graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch

from pagedinfer.distributed.group import Group

Result = TypeVar("Result")


class GraphRecorder:
    """Captures CUDA graphs into memory that they share, since they run one after another.

    What a graph leaves there must be read before another one runs.

    `priority`: of the graphs' kernels, as of a CUDA stream; lower goes first.
    """

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self._stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._has_captured = False

    def capture(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """What `compute` launches, without running it, and what it returns.

        Call `compute` itself first: that loads its kernels, which a capture cannot.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            graph.capture_begin(self._pool, "thread_local")
            try:
                result = compute()
            except BaseException:
                with suppress(RuntimeError):  # it says that the capture has failed
                    graph.capture_end()
                if not self._has_captured:  # a pool without a graph is gone, and its handle with it
                    self._pool = torch.cuda.graph_pool_handle()
                raise
            graph.capture_end()
        self._has_captured = True
        return graph, result

    def close(self) -> None:
        """The graphs have been dropped."""
        torch._C._cuda_clearCublasWorkspaces()  # torch keeps one for each stream that ever ran a GEMM


def sizes_in_time(sizes: Iterable[int], seconds: float, group: Group) -> Iterator[int]:
    """Those of the sizes whose turn comes before so much time has passed.

    For all ranks or none: the capture of a graph begins with a step that they run together.
    """
    deadline = time.monotonic() + seconds
    for size in sizes:
        if group.least([time.monotonic() < deadline])[0]:
            yield size


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What is collected may call CUDA, which would break a capture under way."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
