"""decode_inputs and keep_tokens against the same in a few lines of Python."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pagedinfer import ops
from tests.graph_capture import replay_captured

NUM_SLOTS, NUM_COLUMNS = 9, 12


@dataclass
class State:
    """What the device keeps by slot, at random."""

    last_tokens: Tensor
    num_prompt_tokens: Tensor
    block_table: Tensor
    output_positions: Tensor

    @staticmethod
    def random(device: torch.device) -> State:
        ids = torch.randint(0, 1000, (NUM_SLOTS, NUM_COLUMNS), dtype=torch.int32, device=device)
        return State(
            last_tokens=torch.randint(0, 1000, (NUM_SLOTS,), device=device),
            num_prompt_tokens=torch.randint(1, 4, (NUM_SLOTS,), device=device),
            block_table=ids,
            output_positions=torch.full((NUM_SLOTS,), -7, device=device),
        )

    def copy(self) -> State:
        return State(*(getattr(self, name).clone() for name in self.__dataclass_fields__))


def call(packed: Tensor, state: State, block_size: int) -> ops.DecodeInputs:
    return ops.decode_inputs(
        packed,
        last_tokens=state.last_tokens,
        num_prompt_tokens=state.num_prompt_tokens,
        block_table=state.block_table,
        output_positions=state.output_positions,
        block_size=block_size,
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("block_size", [8, 16, 12])
def test_matches_reference(device: torch.device, block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    state = State.random(device)
    slots = rng.sample(range(NUM_SLOTS), rng.randrange(1, NUM_SLOTS))
    rows = [(slot, rng.randrange(4, NUM_COLUMNS * block_size + 1), rng.choice([-1, 5000])) for slot in slots]
    rows += [(-1, 0, -1)] * rng.randrange(3)
    packed = torch.tensor(list(zip(*rows, strict=True)), dtype=torch.int32, device=device)

    wanted = state.copy()
    got = call(packed, state, block_size)
    for i, (slot, length, new_block) in enumerate(rows):
        if slot < 0:
            assert (got.input_ids[i], got.positions[i], got.slot_mapping[i]) == (0, 0, -1)
            continue
        place, offset = divmod(length - 1, block_size)
        if new_block >= 0:
            wanted.block_table[slot, place] = new_block
        wanted.output_positions[slot] = length - wanted.num_prompt_tokens[slot]
        assert got.input_ids[i] == wanted.last_tokens[slot]
        assert got.positions[i] == length - 1
        assert got.slot_mapping[i] == wanted.block_table[slot, place] * block_size + offset
        assert torch.equal(got.block_table[i, : place + 1], wanted.block_table[slot, : place + 1])
    for name in State.__dataclass_fields__:
        assert torch.equal(getattr(state, name), getattr(wanted, name)), name


def test_keep_tokens(device: torch.device) -> None:
    last = torch.arange(6, device=device)
    slots = torch.tensor([4, -1, 0, 2], dtype=torch.int32, device=device)
    ops.keep_tokens(slots, torch.tensor([40, 11, -1, 22], device=device), last)
    assert last.tolist() == [0, 1, 22, 3, 40, 5]
    ops.keep_tokens(slots[:0], last[:0], last)
    assert last.tolist() == [0, 1, 22, 3, 40, 5]


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    state = State.random(device)
    packed = torch.zeros(3, 2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"packed has shape \[2, 2\]"):
        call(packed[:2], state, 16)
    with pytest.raises(ValueError, match="packed has dtype int64; expected int32"):
        call(packed.long(), state, 16)
    with pytest.raises(ValueError, match="block_size is 0"):
        call(packed, state, 0)
    with pytest.raises(ValueError, match="last_tokens"):
        ops.keep_tokens(packed[0], packed[0].long(), state.last_tokens.int())


def test_refuses_values_out_of_range() -> None:
    """On the CPU, where looking costs nothing."""
    state = State.random(torch.device("cpu"))
    with pytest.raises(ValueError, match=r"slots\[0\] is 9; expected less than num_slots=9"):
        call(torch.tensor([[9], [1], [-1]], dtype=torch.int32), state, 16)
    with pytest.raises(ValueError, match=r"lengths\[0\] is 193; expected 1 to 192"):
        call(torch.tensor([[0], [193], [-1]], dtype=torch.int32), state, 16)
    with pytest.raises(ValueError, match=r"slots\[1\] is 9"):
        ops.keep_tokens(torch.tensor([0, 9], dtype=torch.int32), torch.tensor([1, 1]), state.last_tokens)


@pytest.mark.gpu
def test_runs_from_a_graph() -> None:
    state = State.random(torch.device("cuda"))
    packed = torch.tensor([[3], [20], [77]], dtype=torch.int32, device="cuda")
    made: list[ops.DecodeInputs] = []
    drawn = torch.tensor([123], device="cuda")

    def run() -> None:
        made.append(call(packed, state, 16))
        ops.keep_tokens(packed[0], drawn, state.last_tokens)

    before = int(state.last_tokens[3])
    replay_captured(run)
    assert made[0].input_ids.tolist() == [before]
    assert made[0].slot_mapping.tolist() == [77 * 16 + 3]
    assert state.block_table[3, 1] == 77
    assert state.last_tokens[3] == 123


def test_opcheck(device: torch.device) -> None:
    state = State.random(device)
    packed = torch.tensor([[3, -1], [20, 0], [77, -1]], dtype=torch.int32, device=device)
    longs = torch.empty(3, 2, dtype=torch.int64, device=device)
    rows = torch.zeros(2, NUM_COLUMNS, dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.pagedinfer.decode_inputs.default,
        (
            *(packed, state.last_tokens, state.num_prompt_tokens, 16),
            *(state.block_table, state.output_positions, *longs.unbind(), rows),
        ),
    )
    torch.library.opcheck(torch.ops.pagedinfer.keep_tokens.default, (packed[0], longs[0], state.last_tokens))
