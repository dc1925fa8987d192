"""hold_while: a stream waits for a flag, and not for ever."""

from __future__ import annotations

import time

import pytest
import torch

from pagedinfer import ops


def test_on_a_cpu_nothing_is_waited_for() -> None:
    started = time.perf_counter()
    ops.hold_while(torch.ones(1, dtype=torch.int32), 10_000_000)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    ("flag", "microseconds", "message"),
    [
        (torch.zeros(2, dtype=torch.int32), 1, "flag"),
        (torch.zeros(1, dtype=torch.int64), 1, "flag"),
        (torch.zeros(1, dtype=torch.int32), -1, "microseconds is -1"),
    ],
)
def test_what_it_does_not_take(flag: torch.Tensor, microseconds: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.hold_while(flag, microseconds)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_the_stream_goes_on_when_the_flag_is_cleared(captured: bool) -> None:
    flag, seen = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, device="cuda")

    def held() -> None:
        ops.hold_while(flag, 5_000_000)
        seen.add_(1)

    held()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held()
    flag.fill_(1)
    torch.cuda.synchronize()
    assert seen.item() == 1
    stream, other, ended = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        graph.replay() if captured else held()
        ended.record()
    time.sleep(0.02)
    assert not ended.query()
    with torch.cuda.stream(other):
        flag.zero_()
    ended.synchronize()
    assert seen.item() == 2


@pytest.mark.gpu
def test_the_stream_goes_on_when_the_time_has_passed() -> None:
    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    ops.hold_while(flag, 3000)
    end.record()
    end.synchronize()
    assert 2.9 < begin.elapsed_time(end) < 100
