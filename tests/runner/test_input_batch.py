"""Slot state, and a step's tensors against a token-by-token model of what they should be."""

from __future__ import annotations

import random

import pytest
import torch

from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.runner.input_batch import InputBatch
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


def scheduled(slot: int, start: int, num_tokens: int, sample: bool = True) -> ScheduledRequest:
    return ScheduledRequest(str(slot), slot, start, num_tokens, sample, [])


def test_a_mixed_step(device: torch.device) -> None:
    inputs = make_batch(device)
    inputs.admit(admitted(4, list(range(100, 120)), [7, 3, 9]))
    inputs.admit(admitted(1, [50, 51, 52], [5]))
    slots = torch.tensor([1], dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, torch.tensor([77], device=device))
    step = inputs.prepare(
        Batch(step=0, requests=[scheduled(1, 3, 1), scheduled(4, 6, 5, sample=False), scheduled(1, 0, 3)])
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
    step = inputs.prepare(Batch(step=0, requests=[scheduled(2, 0, 5)]))
    assert step.output_positions[2].item() == 2
    step = inputs.prepare(Batch(step=1, requests=[scheduled(2, 5, 1)]))
    assert step.output_positions[2].item() == 3


def test_decodes_need_no_row_index(device: torch.device) -> None:
    inputs = make_batch(device)
    for slot in (0, 3):
        inputs.admit(admitted(slot, [slot], [slot]))
    slots = torch.tensor([3, 0], dtype=torch.int32, device=device)
    inputs.set_last_tokens(slots, torch.tensor([33, 30], device=device))
    step = inputs.prepare(Batch(step=0, requests=[scheduled(0, 1, 1), scheduled(3, 1, 1)]))
    assert step.input_ids.tolist() == [30, 33]
    assert step.sample_rows is None


def test_a_slot_can_be_taken_again(device: torch.device) -> None:
    inputs = make_batch(device)
    inputs.admit(admitted(0, list(range(20)), [1, 2, 3]))
    inputs.release(0)
    inputs.admit(admitted(0, [9, 8], [6]))
    step = inputs.prepare(Batch(step=0, requests=[scheduled(0, 0, 2)]))
    assert step.input_ids.tolist() == [9, 8]
    assert step.slot_mapping.tolist() == [48, 49]


@pytest.mark.parametrize("seed", range(20))
def test_random_runs_equal_the_naive_model(seed: int, device: torch.device) -> None:
    """Requests of random lengths advance in random chunks; every token is checked one by one."""
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
        step = inputs.prepare(batch)
        expected = [
            (tokens[r.slot][p], p, tables[r.slot][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE)
            for r in batch.requests
            for p in range(r.start, r.start + r.num_tokens)
        ]
        got = zip(step.input_ids.tolist(), step.positions.tolist(), step.slot_mapping.tolist(), strict=True)
        assert list(got) == expected
        drawn = [rng.randrange(1000) for r in batch.requests if r.sample]
        inputs.set_last_tokens(step.sample_slots, torch.tensor(drawn, device=device, dtype=torch.int64))
        for row, request in enumerate(batch.requests):
            computed[request.slot] += request.num_tokens
            used = -(-computed[request.slot] // BLOCK_SIZE)
            assert step.block_table[row, :used].tolist() == tables[request.slot][:used]
            if request.sample:
                tokens[request.slot].append(drawn.pop(0))
