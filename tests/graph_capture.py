"""Running an op from a CUDA graph, for the tests that ops can be captured."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replay_captured(function: Callable[[], object]) -> None:
    """Captures what `function` launches, without running it, then runs it once. Waits for the end.

    A launch on another stream than the current one, an allocation by the driver or a wait for the device
    makes the capture fail.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    graph.replay()
    torch.cuda.synchronize()
