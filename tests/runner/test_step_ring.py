"""read_ring, write_ring and StepRing: each step finds its own place, however they follow one another."""

from __future__ import annotations

from collections import deque
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.runner.step_result import DrawnTokens, HostTokens, StepResult
from pagedinfer.runner.step_ring import StepRing

PLACES, WIDTH = 3, 5


def ring(device: torch.device) -> Tensor:
    """Of numbers that tell the place and the element."""
    numbers = torch.arange(PLACES, dtype=torch.int32)[:, None] * 100 + torch.arange(WIDTH, dtype=torch.int32)
    return numbers.pin_memory() if device.type == "cuda" else numbers


@pytest.mark.parametrize("size", [0, 1, WIDTH])
def test_a_step_reads_and_writes_its_own_place(device: torch.device, size: int) -> None:
    given, taken = ring(device), ring(device)
    turn = torch.zeros(1, dtype=torch.int64, device=device)
    for step in range(2 * PLACES):
        out = torch.full((size,), -1, dtype=torch.int32, device=device)
        ops.read_ring(given, turn, out)
        assert turn.item() == step
        assert out.tolist() == [step % PLACES * 100 + i for i in range(size)]
        wanted = taken.clone()
        wanted[step % PLACES, :size] = torch.arange(size) - step
        ops.write_ring(torch.arange(size, dtype=torch.int32, device=device) - step, turn, taken)
        assert turn.item() == step + 1  # which waits for it
        assert torch.equal(taken, wanted)
    assert torch.equal(given, ring(device))


def test_more_elements_than_a_block_has_threads(device: torch.device) -> None:
    given = torch.arange(2 * 2500, dtype=torch.int32).view(2, 2500)
    given = given.pin_memory() if device.type == "cuda" else given
    taken = torch.zeros_like(given, pin_memory=given.is_pinned())
    turn = torch.ones(1, dtype=torch.int64, device=device)
    out = torch.empty(2500, dtype=torch.int32, device=device)
    ops.read_ring(given, turn, out)
    ops.write_ring(out, turn, taken)
    assert turn.item() == 2
    assert torch.equal(taken[1], given[1])
    assert not taken[0].any()


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    numbers, turn = ring(device), torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(WIDTH, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"out has 6 elements; expected at most 5"):
        ops.read_ring(numbers, turn, torch.zeros(6, dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"values has 6 elements; expected at most 5"):
        ops.write_ring(torch.zeros(6, dtype=torch.int32, device=device), turn, numbers)
    with pytest.raises(ValueError, match="turn has dtype int32; expected int64"):
        ops.read_ring(numbers, turn.int(), out)
    with pytest.raises(ValueError, match="out has dtype int64; expected int32"):
        ops.read_ring(numbers, turn, out.long())
    with pytest.raises(ValueError, match="ring has no places"):
        ops.read_ring(numbers[:0], turn, out)
    with pytest.raises(ValueError, match="contiguous"):
        ops.write_ring(out[::2], turn, numbers)


def test_a_turn_before_the_first_is_refused() -> None:
    """On the CPU, where it would be memory in front of the ring."""
    numbers, turn = ring(torch.device("cpu")), torch.tensor([-1])
    out = torch.zeros(WIDTH, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"read_ring: turn is -1; expected >= 0"):
        ops.read_ring(numbers, turn, out)
    with pytest.raises(ValueError, match=r"write_ring: turn is -1; expected >= 0"):
        ops.write_ring(out, turn, numbers)


@pytest.mark.gpu
def test_memory_that_is_not_pinned_is_refused() -> None:
    turn, out = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.zeros(5, dtype=torch.int32).cuda()
    with pytest.raises(ValueError, match="not pinned"):
        ops.read_ring(ring(torch.device("cpu")), turn, out)
    with pytest.raises(ValueError, match="ring is on cuda:0; expected cpu"):
        ops.write_ring(out, turn, ring(torch.device("cpu")).cuda())


def test_opcheck() -> None:
    """On the CPU: it makes copies of its arguments, which are not pinned."""
    numbers, turn = ring(torch.device("cpu")), torch.zeros(1, dtype=torch.int64)
    out = torch.zeros(3, dtype=torch.int32)
    torch.library.opcheck(torch.ops.pagedinfer.read_ring.default, (numbers, turn, out))
    torch.library.opcheck(torch.ops.pagedinfer.write_ring.default, (out, turn, numbers))


# ---- StepRing ----


class Adder:
    """Steps that draw, as the token of each row, the sum of what the row is given and the extra element."""

    def __init__(self, device: torch.device, max_rows: int = 4) -> None:
        self.ring = StepRing(max_rows, 1, device)
        self._device = device
        self._inputs = torch.zeros(3 * max_rows + 1, dtype=torch.int32, device=device)
        self._memory = torch.zeros(DrawnTokens.nbytes(max_rows), dtype=torch.uint8, device=device)

    def launch(self, number: int, size: int = 2) -> StepResult:
        place = self.ring.next_place()
        host = place.of(size)
        host.rows[:] = number
        host.extra[0] = 1000
        drawn = DrawnTokens(size, self._device, self._memory)
        self.ring.launch(lambda: self._step(size, drawn))
        result = StepResult(drawn, size, host=host.tokens)
        place.occupy(result)
        return result

    def _step(self, size: int, drawn: DrawnTokens) -> None:
        inputs = self._inputs[: 3 * size + 1]
        self.ring.read(inputs)
        drawn.token_ids.copy_(inputs[:-1].view(3, size).sum(0) + inputs[-1])
        drawn.logprobs.copy_(inputs[:size] * 0.5)
        self.ring.write(drawn)


def check(result: StepResult, number: int, size: int = 2) -> None:
    output = result.result()
    assert output.token_ids.tolist() == [3 * number + 1000] * size
    assert output.logprobs.tolist() == [0.5 * number] * size


def test_sizes_and_the_time_when_a_result_is_taken_are_as_one_likes(device: torch.device) -> None:
    adder, rng = Adder(device), np.random.default_rng(0)
    under_way: deque[tuple[StepResult, int, int]] = deque()
    for number in range(200):
        size = int(rng.integers(1, 5))
        under_way.append((adder.launch(number, size), number, size))
        while under_way and rng.integers(7) > len(under_way):
            check(*under_way.popleft())
    assert len(under_way) > 0
    for step in under_way:
        check(*step)


def test_a_result_that_is_taken_late_or_never_is_nobody_elses(device: torch.device) -> None:
    adder = Adder(device)
    first = adder.launch(0)
    for number in range(1, 10):
        adder.launch(number)
    assert first.is_ready
    first.wait()
    check(first, 0)
    taken = first.result()
    check(adder.launch(10), 10)
    for number in range(10):
        adder.launch(number)
    assert first.result() is taken
    check(first, 0)


def test_an_interrupted_wait_for_a_place_loses_no_result(device: torch.device) -> None:
    adder = Adder(device)
    untaken = [(adder.launch(number), number) for number in range(4)]  # of every place
    with (
        patch.object(HostTokens, "wait", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        adder.launch(100)
    for number in range(4, 9):
        check(adder.launch(number), number)
    for result, number in untaken:
        check(result, number)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_launch_leaves_later_steps_their_places(device: torch.device, when: str) -> None:
    """Whether the device has counted the step or not."""
    adder = Adder(device)
    step = adder._step

    def interrupted(size: int, drawn: DrawnTokens) -> None:
        if when == "after":
            step(size, drawn)
        raise KeyboardInterrupt

    for number in range(7):
        before = adder.launch(number)
        adder._step = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            adder.launch(100 + number)
        adder._step = step  # type: ignore[method-assign]
        check(adder.launch(200 + number), 200 + number)
        check(before, number)
