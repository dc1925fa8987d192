"""Slot state, and a step's tensors against a token-by-token model of what they should be."""

from __future__ import annotations

import random
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pagedinfer._core import pack_decodes
from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.runner.input_batch import DrawInputs, InputBatch, ModelInputs, StepShape
from pagedinfer.sampling_params import SamplingParams

BLOCK_SIZE = 8


def make_batch(device: torch.device, max_num_seqs: int = 6) -> InputBatch:
    return InputBatch(max_num_seqs=max_num_seqs, max_model_len=64, block_size=BLOCK_SIZE, device=device)


def admitted(slot: int, token_ids: list[int], block_ids: list[int], num_prompt: int = 0) -> AdmittedRequest:
    return AdmittedRequest(
        request_id=str(slot),
        slot=slot,
        token_ids=token_ids,
        num_prompt_tokens=num_prompt or len(token_ids),
        block_ids=block_ids,
        sampling_params=SamplingParams(),
        seed=0,
    )


def tensors(*groups: ModelInputs | DrawInputs) -> SimpleNamespace:
    """All that a step is given, in one."""
    return SimpleNamespace(
        **{each.name: getattr(group, each.name) for group in groups for each in fields(group)}
    )


def prepare(inputs: InputBatch, batch: Batch, shape: StepShape | None = None) -> SimpleNamespace:
    step = inputs.send(batch, shape)
    columns = step.num_columns if shape is None else None
    return tensors(inputs.unpack(step.packed, step.shape, columns), step.draw)


def scheduled(slot: int, start: int, num_tokens: int, sample: bool = True) -> ScheduledRequest:
    return ScheduledRequest(str(slot), slot, start, num_tokens, sample, [])


def test_a_mixed_step(device: torch.device) -> None:
    inputs = make_batch(device)
    inputs.admit(admitted(4, list(range(100, 120)), [7, 3, 9]))
    inputs.admit(admitted(1, [50, 51, 52], [5]))
    slots = torch.tensor([1], dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, torch.tensor([77], device=device))
    step = prepare(
        inputs,
        Batch(step=0, requests=[scheduled(1, 3, 1), scheduled(4, 6, 5, sample=False), scheduled(1, 0, 3)]),
    )
    assert step.input_ids.tolist() == [77, 106, 107, 108, 109, 110, 50, 51, 52]
    assert step.positions.tolist() == [3, 6, 7, 8, 9, 10, 0, 1, 2]
    assert step.slot_mapping.tolist() == [43, 62, 63, 24, 25, 26, 40, 41, 42]
    assert step.query_start_loc.tolist() == [0, 1, 6, 9]
    assert step.seq_lens.tolist() == [4, 11, 3]
    assert step.block_table.tolist() == [[5, 0], [7, 3], [5, 0]]
    assert step.max_query_len == 5
    assert step.sample_rows is not None
    assert step.sample_rows.tolist() == [0, 8]
    assert step.sample_slots.tolist() == [1, 1]
    dtypes = (step.input_ids, step.slot_mapping, step.query_start_loc, step.seq_lens, step.block_table)
    assert [tensor.dtype for tensor in dtypes] == [torch.int64, torch.int64, *[torch.int32] * 3]
    assert all(tensor.device.type == device.type for tensor in dtypes)


def test_output_positions_count_generated_tokens_also_after_a_resume(device: torch.device) -> None:
    inputs = make_batch(device)
    inputs.admit(admitted(2, [1, 2, 3, 4, 5], [0], num_prompt=3))  # two of them were generated before
    step = prepare(inputs, Batch(step=0, requests=[scheduled(2, 0, 5)]))
    assert step.output_positions[2].item() == 2
    step = prepare(inputs, Batch(step=1, requests=[scheduled(2, 5, 1)]))
    assert step.output_positions[2].item() == 3


def test_decodes_need_no_row_index(device: torch.device) -> None:
    inputs = make_batch(device)
    for slot in (0, 3):
        inputs.admit(admitted(slot, [slot], [slot]))
    slots = torch.tensor([3, 0], dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, torch.tensor([33, 30], device=device))
    step = prepare(inputs, Batch(step=0, requests=[scheduled(0, 1, 1), scheduled(3, 1, 1)]))
    assert step.input_ids.tolist() == [30, 33]
    assert step.sample_rows is None


def test_a_slot_can_be_taken_again(device: torch.device) -> None:
    inputs = make_batch(device)
    inputs.admit(admitted(0, list(range(20)), [1, 2, 3]))
    inputs.release(0)
    inputs.admit(admitted(0, [9, 8], [6]))
    step = prepare(inputs, Batch(step=0, requests=[scheduled(0, 0, 2)]))
    assert step.input_ids.tolist() == [9, 8]
    assert step.slot_mapping.tolist() == [48, 49]


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_equal_the_naive_model(seed: int, device: torch.device) -> None:
    """Requests of random lengths advance in random chunks; every token is checked one by one.

    Every second run is padded.
    """
    rng = random.Random(seed)
    inputs = make_batch(device)
    tokens: dict[int, list[int]] = {}
    tables: dict[int, list[int]] = {}
    computed = dict.fromkeys(range(6), 0)
    for slot in range(6):
        tokens[slot] = [rng.randrange(1000) for _ in range(rng.randrange(1, 40))]
        tables[slot] = rng.sample(range(100), 1)
        inputs.admit(admitted(slot, tokens[slot], list(tables[slot])))
    for step_number in range(12):
        batch = Batch(step=step_number)
        for slot in rng.sample(range(6), rng.randrange(1, 7)):
            left = len(tokens[slot]) - computed[slot]
            count = min(rng.randrange(1, 12), left)
            if computed[slot] + count > 60:
                continue
            request = scheduled(slot, computed[slot], count, sample=count == left)
            while len(tables[slot]) * BLOCK_SIZE < computed[slot] + count:
                tables[slot].append(rng.randrange(100))
                inputs.append_blocks(slot, tables[slot][-1:])
            batch.requests.append(request)
        if not batch.requests:
            continue
        num_tokens, num_rows, shape = batch.num_tokens, len(batch.requests), None
        if seed % 2:
            shape = StepShape(
                num_tokens + rng.randrange(20), num_rows + rng.randrange(5), 12 + rng.randrange(9)
            )
        step = prepare(inputs, batch, shape)
        expected = [
            (tokens[r.slot][p], p, tables[r.slot][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
            for r in batch.requests
            for p in range(r.start, r.start + r.num_tokens)
        ]
        columns = (step.input_ids, step.positions, step.slot_mapping)
        got = list(zip(*(column.tolist() for column in columns), strict=True))
        assert got[:num_tokens] == expected
        assert all(slot == -1 for _, _, slot in got[num_tokens:])
        assert step.seq_lens.tolist() == [r.start + r.num_tokens for r in batch.requests] + [0] * (
            len(step.seq_lens) - num_rows
        )
        starts = step.query_start_loc.tolist()
        assert starts[num_rows:] == [num_tokens] * (len(starts) - num_rows)
        assert len(got) == (num_tokens if shape is None else shape.num_tokens)
        drawn = [rng.randrange(1000) for r in batch.requests if r.sample]
        inputs.set_last_tokens(step.sample_slots, torch.tensor(drawn, device=device, dtype=torch.int64))
        for row, request in enumerate(batch.requests):
            computed[request.slot] += request.num_tokens
            used = -(-computed[request.slot] // BLOCK_SIZE)
            assert step.block_table[row, :used].tolist() == tables[request.slot][:used]
            if request.sample:
                tokens[request.slot].append(drawn.pop(0))


def test_a_step_of_nothing_but_padding(device: torch.device) -> None:
    inputs = make_batch(device)
    shape = StepShape(num_tokens=5, num_rows=3, max_query_len=5)
    step = inputs.unpack(torch.from_numpy(inputs.padding(shape)).to(device), shape)
    assert step.slot_mapping.tolist() == [-1] * 5
    assert step.positions.tolist() == [0] * 5
    assert step.query_start_loc.tolist() == [0] * 4
    assert step.seq_lens.tolist() == [0] * 3


# ---- steps of decodes alone ------------------------------------------------------------------------


def decoding_batch(device: torch.device, lengths: dict[int, int]) -> InputBatch:
    """Slots with prompts of these lengths, computed, their first token drawn: 900 + slot."""
    inputs = make_batch(device)
    for slot, length in lengths.items():
        blocks = [10 * slot + i for i in range(-(-length // BLOCK_SIZE))]
        inputs.admit(admitted(slot, list(range(length)), blocks))
    prepare(inputs, Batch(step=0, requests=[scheduled(slot, 0, n) for slot, n in lengths.items()]))
    slots = torch.tensor(list(lengths), dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, 900 + slots.long())
    return inputs


def decode_of(slot: int, start: int, *new_block_ids: int) -> ScheduledRequest:
    return ScheduledRequest(str(slot), slot, start, 1, sample=True, new_block_ids=list(new_block_ids))


def pack(inputs: InputBatch, *requests: ScheduledRequest) -> npt.NDArray[np.int32] | None:
    return inputs.pack_decodes(Batch(step=1, requests=list(requests)))


def test_a_step_of_decodes_with_padding(device: torch.device) -> None:
    inputs = decoding_batch(device, {4: 16, 0: 3, 2: 20})
    packed = pack(inputs, decode_of(2, 20), decode_of(4, 16, 77), decode_of(0, 3))
    assert packed is not None
    assert packed.tolist() == [[2, 4, 0], [21, 17, 4], [-1, 77, -1]]
    padded = np.array([[-1], [0], [-1]], np.int32).repeat(5, axis=1)
    padded[:, :3] = packed
    step = tensors(*inputs.unpack_decodes(torch.from_numpy(padded).to(device)))
    assert step.input_ids[:3].tolist() == [902, 904, 900]
    assert step.positions.tolist() == [20, 16, 3, 0, 0]
    assert step.slot_mapping.tolist() == [22 * 8 + 4, 77 * 8, 3, -1, -1]
    assert step.seq_lens.tolist() == [21, 17, 4, 0, 0]
    assert step.query_start_loc.tolist() == [0, 1, 2, 3, 4, 5]
    assert step.block_table[0, :3].tolist() == [20, 21, 22]
    assert step.block_table[1, :3].tolist() == [40, 41, 77]
    assert step.block_table[2, :1].tolist() == [0]
    assert step.sample_slots.tolist() == [2, 4, 0, -1, -1]
    assert step.output_positions[[2, 4, 0]].tolist() == [1, 1, 1]
    assert (step.max_query_len, step.sample_rows) == (1, None)
    inputs.set_last_tokens(step.sample_slots, torch.tensor([5, 6, 7, -1, -1], device=device))
    # The next step is any step: the block that came with the decode is known to it too.
    after = prepare(inputs, Batch(step=2, requests=[decode_of(0, 4), decode_of(4, 17)]))
    assert after.input_ids.tolist() == [7, 6]
    assert after.block_table.tolist() == [[0, *after.block_table[0, 1:].tolist()], [40, 41, 77]]
    assert after.output_positions[[0, 4]].tolist() == [2, 2]


def test_what_is_not_a_step_of_decodes_alone() -> None:
    inputs = decoding_batch(torch.device("cpu"), {0: 8, 1: 3})
    decode = decode_of(1, 3)
    assert pack(inputs) is None
    assert pack(inputs, decode, scheduled(0, 2, 6)) is None  # a chunk
    assert pack(inputs, decode, scheduled(0, 7, 1)) is None  # a chunk of one token, which is known
    assert pack(inputs, decode, decode_of(0, 8, 5, 6)) is None  # more than one block
    assert pack(inputs, decode, decode_of(1, 4, 5)) is None  # a block before there is a token for it
    newcomer = Batch(step=1, requests=[decode], admitted=[admitted(3, [1], [9])])
    assert inputs.pack_decodes(newcomer) is None
    assert pack(inputs, decode, decode_of(0, 8, 5)) is not None  # none of these has changed anything


def test_arrays_that_do_not_fit_are_refused() -> None:
    by_slot = np.zeros((2, 4), np.int32)
    for shape in ((3, 2), (2, 1)):
        with pytest.raises(ValueError, match=rf"must be \[3, 1\], got \[{shape[0]}, {shape[1]}\]"):
            pack_decodes([decode_of(0, 3)], np.zeros(shape, np.int32), *by_slot, 8)
    with pytest.raises(TypeError):
        pack_decodes([decode_of(0, 3)], np.zeros((3, 1), np.int64), *by_slot, 8)  # type: ignore[arg-type]
    for slot in (-1, 4):
        with pytest.raises(ValueError, match=f"slot {slot} is none of 4"):
            pack_decodes([decode_of(slot, 3)], np.zeros((3, 1), np.int32), *by_slot, 8)


def test_a_token_that_could_not_be_sampled_is_some_token_to_the_next_step(device: torch.device) -> None:
    inputs = decoding_batch(device, {1: 3})
    slots = torch.tensor([1], dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, torch.tensor([-1], device=device))
    assert prepare(inputs, Batch(step=1, requests=[decode_of(1, 3)])).input_ids.tolist() == [0]


@pytest.mark.parametrize("seed", range(5))
def test_random_decodes_equal_any_step(seed: int, device: torch.device) -> None:
    """The same requests twice: as steps of decodes, padded, and as any step."""
    rng = random.Random(seed)
    lengths = {slot: rng.randrange(1, 30) for slot in range(6)}
    quick, plain = decoding_batch(device, lengths), decoding_batch(device, lengths)
    computed, num_blocks = dict(lengths), {slot: -(-n // BLOCK_SIZE) for slot, n in lengths.items()}
    for number in range(1, 25):
        batch = Batch(step=number)
        for slot in rng.sample(range(6), rng.randrange(1, 7)):
            new = [100 + 6 * number + slot] if num_blocks[slot] * BLOCK_SIZE == computed[slot] else []
            num_blocks[slot] += len(new)
            batch.requests.append(decode_of(slot, computed[slot], *new))
            computed[slot] += 1
            if new:
                plain.append_blocks(slot, new)
        packed = quick.pack_decodes(batch)
        assert packed is not None
        num_rows = len(batch.requests)
        padded = np.array([[-1], [0], [-1]], np.int32).repeat(num_rows + seed, axis=1)
        padded[:, :num_rows] = packed
        found = tensors(*quick.unpack_decodes(torch.from_numpy(padded).to(device)))
        wanted = prepare(plain, batch)
        for name in ("input_ids", "positions", "slot_mapping", "seq_lens", "sample_slots"):
            assert getattr(found, name)[:num_rows].tolist() == getattr(wanted, name).tolist()
        for row, request in enumerate(batch.requests):
            used = -(-computed[request.slot] // BLOCK_SIZE)
            assert found.block_table[row, :used].tolist() == wanted.block_table[row, :used].tolist()
        drawn = torch.tensor([rng.randrange(1000) for _ in batch.requests], device=device)
        plain.set_last_tokens(wanted.sample_slots, drawn)
        quick.set_last_tokens(found.sample_slots, torch.nn.functional.pad(drawn, (0, seed), value=-1))
        assert found.output_positions.tolist() == wanted.output_positions.tolist()
