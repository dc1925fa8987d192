"""sample_tokens draws exactly what the oracle of the same arithmetic draws."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pagedinfer import ops
from tests import reference
from tests.sampler.slots import (
    SlotParameters,
    all_slots,
    draw,
    mixed_parameters,
    slot_parameters,
    to_device,
)

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF = math.inf


def sample(logits: Tensor, parameters: SlotParameters, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and log-probabilities, row i with slot i; computed on the device, handed back on the CPU."""
    logprobs = torch.full((len(logits),), 7.0, device=device)
    token_ids = ops.sample_tokens(
        logits.to(device),
        all_slots(len(logits), device),
        **to_device(parameters, device),
        logprobs=logprobs,
    )
    return token_ids.cpu(), logprobs.cpu()


def assert_equals_oracle(logits: Tensor, parameters: SlotParameters, device: torch.device) -> None:
    token_ids, logprobs = sample(logits, parameters, device)
    expected_ids, expected_logprobs = reference.sample_tokens(logits, all_slots(len(logits)), **parameters)
    assert token_ids.tolist() == expected_ids.tolist()
    torch.testing.assert_close(logprobs, expected_logprobs.float(), atol=1e-5, rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 2, 63, 64, 65, 300, 2049, 9001, 49_152])
def test_equals_oracle(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 24
    spread = torch.tensor([0.01, 1.0, 3.0, 10.0]).repeat(num_rows // 4)[:, None]
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(dtype)
    assert_equals_oracle(logits, mixed_parameters(num_rows, generator), device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_oracle_at_a_large_vocabulary(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(6, 151_936, generator=generator) * 3).to(dtype)
    parameters = slot_parameters(
        6,
        temperature=[0.0, 1.0, 1.0, 0.8, 1.0, 3.0],
        top_k=[0, 50, 0, 0, 3000, 0],
        top_p=[1.0, 0.95, 0.95, 1.0, 0.9, 0.5],
        min_p=[0.0, 0.0, 0.0, 0.05, 0.0, 0.0],
        seeds=range(6),
    )
    assert_equals_oracle(logits, parameters, device)


def test_equals_oracle_at_the_largest_vocabulary(device: torch.device) -> None:
    """Sums of weights go up to 2^63."""
    logits = torch.zeros(3, 2**19)
    parameters = slot_parameters(3, top_p=[1.0, 0.75, 1.0], top_k=[0, 0, 400_000], seeds=[1, 2, 3])
    assert_equals_oracle(logits, parameters, device)


@pytest.mark.parametrize(
    ("vocab_size", "values"),
    [
        (20_001, [0.0]),
        (20_001, [0.0, -0.0]),
        (20_000, [1.0, 1.0 + 2**-23, 1.0 + 2**-22]),
        (30_000, [5.0, 4.999, 4.998, -20.0]),
        (9_000, [-INF, 2.0, 2.0625]),
    ],
)
def test_more_ties_than_a_list_takes(vocab_size: int, values: list[float], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    picks = torch.randint(len(values), (12, vocab_size), generator=generator)
    logits = torch.tensor(values)[picks]
    parameters = slot_parameters(
        12,
        temperature=[1.0] * 8 + [0.5, 50.0, 0.0, 1e-5],
        top_k=[0, 0, 1, 2500, 4000, 4000, 7000, 0, 6000, 2500, 0, 0],
        top_p=[0.5, 0.999, 0.5, 1.0, 0.6, 1.0, 0.9, 1.0, 0.9, 0.5, 1.0, 0.5],
        min_p=[0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.99, 0.99, 0.0, 0.0, 0.0, 0.0],
        seeds=range(12),
    )
    assert_equals_oracle(logits, parameters, device)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equals_oracle_with_many_ties(data: st.DataObject, device: torch.device) -> None:
    values = data.draw(
        st.lists(
            st.sampled_from([-INF, -30.0, -1.0, -0.0, 0.0, 0.5, 1.0, 1.0 + 2**-23, 3.0, 80.0])
            | st.floats(-50, 50, width=32),
            min_size=1,
            max_size=5,
        )
    )
    row = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=300))
    temperature = data.draw(st.sampled_from([0.0, 1e-5, 0.3, 1.0, 10.0]) | st.floats(2**-16, 100, width=32))
    top_k = data.draw(st.integers(-1, len(row) + 1))
    top_p = data.draw(st.sampled_from([1.0, 0.5, 1e-10]) | st.floats(2**-20, 1, width=32))
    min_p = data.draw(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1, width=32))
    num_draws = 16
    parameters = slot_parameters(
        num_draws,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=data.draw(st.integers(-(2**63), 2**63 - 1)),
        positions=torch.arange(num_draws),
    )
    assert_equals_oracle(torch.tensor([row] * num_draws), parameters, device)


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 3}, [0, 3, 5]),
        ({"top_k": 4}, [0, 1, 3, 5]),
        ({"top_p": 0.5}, [3, 5]),
        ({"top_p": 0.7}, [0, 3, 5]),
        ({"min_p": 0.4}, [3, 5]),
        ({"min_p": 0.3}, [0, 1, 2, 3, 5]),
        ({"top_k": 3, "top_p": 0.75}, [3, 5]),
        ({"top_k": 4, "top_p": 0.999}, [0, 1, 3, 5]),
        ({"top_k": 4, "min_p": 0.5}, [3, 5]),
    ],
)
def test_kept_set_by_hand(filters: dict[str, float], kept: list[int], device: torch.device) -> None:
    """Weights 1, 1, 1, 3, -, 3 ninths: every kept token is drawn sooner or later, and no other."""
    logits = torch.log(torch.tensor([1.0, 1.0, 1.0, 3.0, 0.0, 3.0], device=device))
    assert sorted(set(draw(logits, 400, **filters).tolist())) == kept


def test_greedy_takes_the_lowest_id_of_the_largest(device: torch.device) -> None:
    logits = torch.full((5, 20_000), -1.0)
    logits[0, [17, 18, 19_999]] = 4.0
    logits[1, 19_999] = 4.0
    logits[2] = 0.0
    logits[2, 0] = -0.0  # equal to 0.0
    logits[3] = -3.4e38
    logits[4] = -INF
    logits[4, 12_345] = -3.4e38
    parameters = slot_parameters(5, temperature=[0.0, 9.9e-6, 0.0, 0.0, 0.0], top_k=3, top_p=0.1)
    assert sample(logits, parameters, device)[0].tolist() == [17, 19_999, 0, 0, 12_345]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, -math.nan, INF])
def test_unsampleable_rows_fail_alone(poison: float, temperature: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, 5000, generator=generator)
    healthy, _ = sample(logits, slot_parameters(6, temperature=temperature, top_p=0.9), device)
    for row, column in ((1, 0), (3, 4999), (4, 2500)):
        logits[row, column] = poison
    logits[5] = -INF
    token_ids, logprobs = sample(logits, slot_parameters(6, temperature=temperature, top_p=0.9), device)
    assert token_ids.tolist() == [healthy[0], -1, healthy[2], -1, -1, -1]
    assert logprobs.isnan().tolist() == [False, True, False, True, True, True]


def test_log_probabilities_only_where_they_are_wanted(device: torch.device) -> None:
    logits = torch.randn(4, 5000, device=device)
    logits[3, 77] = torch.nan
    slots = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=device)
    parameters = slot_parameters(4, device, temperature=[1.0, 0.0, 0.7, 1.0], top_k=[0, 0, 5, 0])
    all_of_them, wanted = torch.full((2, 4), 7.0, device=device)
    ops.sample_tokens(logits, slots, **parameters, logprobs=all_of_them)
    wants = torch.tensor([True, False, False, False], device=device)
    token_ids = ops.sample_tokens(logits, slots, **parameters, logprobs=wanted, wants_logprob=wants)
    assert token_ids.tolist() == ops.sample_tokens(logits, slots, **parameters).tolist()
    assert wanted[:3].tolist() == [0.0, all_of_them[1].item(), 0.0]
    assert all_of_them[1] < 0
    assert wanted[3].isnan()


def test_padding_rows_and_slots_in_any_order(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(5, 300, generator=generator).to(device)
    parameters = mixed_parameters(8, generator)
    slots = torch.tensor([6, -1, 0, 3, -1], dtype=torch.int32)
    token_ids = torch.full((5,), 99, device=device)
    logprobs = torch.full((5,), 99.0, device=device)
    out = ops.sample_tokens(
        logits,
        slots.to(device),
        **to_device(parameters, device),
        token_ids=token_ids,
        logprobs=logprobs,
    )
    expected_ids, expected_logprobs = reference.sample_tokens(logits, slots, **parameters)
    assert out is token_ids
    assert token_ids.tolist() == expected_ids.tolist()
    assert token_ids[[1, 4]].tolist() == [-1, -1]
    assert logprobs[[1, 4]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_padded_vocabulary_is_never_drawn(dtype: torch.dtype, device: torch.device) -> None:
    """vllm#13175: what lies from vocab_size on may hold anything and wins nothing."""
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(40, 320, generator=generator)
    parameters = mixed_parameters(40, generator)
    for vocab_size in (304, 301, 300, 1):
        logits[:, vocab_size] = 50.0
        logits[:, vocab_size + 1 :] = math.nan
        padded = logits.to(dtype)
        token_ids = ops.sample_tokens(
            padded.to(device), all_slots(40, device), **to_device(parameters, device), vocab_size=vocab_size
        )
        expected, _ = reference.sample_tokens(padded, all_slots(40), **parameters, vocab_size=vocab_size)
        assert token_ids.tolist() == expected.tolist()
        assert 0 <= token_ids.min() <= token_ids.max() < vocab_size


def test_extreme_top_p(device: torch.device) -> None:
    """TGI#2222: 1.0 changes nothing, the tiniest leaves the best token."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(7)).to(device)
    assert torch.equal(draw(logits, 200, top_p=1.0), draw(logits, 200))
    assert len(set(draw(logits, 200).tolist())) > 100
    for top_p in (1e-10, 1e-38, 0.0, -1.0):
        assert set(draw(logits, 50, top_p=top_p).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1e-3, 0.0099])
def test_tiny_temperatures_do_not_overflow(temperature: float, device: torch.device) -> None:
    logits = torch.tensor([-3e38, 1e30, 3e38, 3e38, -INF, 2.9e38], device=device)
    assert set(draw(logits, 200, temperature=temperature).tolist()) == {2, 3}
    close = torch.tensor([1.0, 1.0 - 1e-6, 0.5], device=device)
    expected = reference.kept_tokens(close.cpu().numpy(), temperature, 0, 1.0, 0.0)[1]
    drawn = set(draw(close, 400, temperature=temperature).tolist())
    assert drawn == {0, 1}
    assert int(expected[2]) == 0


def test_meaningless_parameters_do_no_harm(device: torch.device) -> None:
    """A slot that holds garbage still draws a token of the vocabulary."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(6, 3000, generator=generator)
    parameters = slot_parameters(
        6,
        temperature=[math.nan, -1.0, INF, 1.0, 1.0, 1.0],
        top_k=[-(2**31), 2**31 - 1, 5, 0, 0, 0],
        top_p=[0.5, 0.5, 0.5, math.nan, 2.0, 1.0],
        min_p=[0.0, 0.0, 0.0, math.nan, -1.0, 7.0],
    )
    token_ids, _ = sample(logits, parameters, device)
    best = logits.argmax(-1)
    assert token_ids[0] == best[0]
    assert token_ids[1] == best[1]
    assert token_ids[2] in logits[2].topk(5).indices
    plain, _ = sample(logits, slot_parameters(6), device)
    assert token_ids[[3, 4]].tolist() == plain[[3, 4]].tolist()
    assert token_ids[5] == best[5]


def test_a_row_is_the_same_alone_and_in_any_batch(device: torch.device) -> None:
    """vllm#51226: not the batch, nor the order, nor the slot, nor what the neighbours want."""
    generator = torch.Generator().manual_seed(9)
    num_rows = 40
    logits = (torch.randn(num_rows, 5003, generator=generator) * 2).to(device)
    parameters = to_device(mixed_parameters(num_rows, generator), device)
    together = ops.sample_tokens(logits, all_slots(num_rows, device), **parameters)
    assert torch.equal(together, ops.sample_tokens(logits, all_slots(num_rows, device), **parameters))

    order = torch.randperm(num_rows, generator=generator).to(device)
    moved = SlotParameters(**{name: value[order] for name, value in parameters.items()})
    shuffled = ops.sample_tokens(logits[order], all_slots(num_rows, device), **moved)
    assert torch.equal(shuffled, together[order])

    for row in range(num_rows):
        slot = torch.tensor([row], dtype=torch.int32, device=device)
        alone = ops.sample_tokens(logits[row : row + 1], slot, **parameters)
        assert alone.item() == together[row].item()


def test_greedy_beside_sampled_rows_with_masked_logits(device: torch.device) -> None:
    """vllm#22180: -inf logits of a greedy row next to a seeded one, each as if alone, nothing NaN."""
    generator = torch.Generator().manual_seed(10)
    logits = torch.randn(2, 500, generator=generator)
    logits[0, logits[0].argmax()] = -INF
    logits[1, ::2] = -INF
    parameters = slot_parameters(2, temperature=[0.0, 1.0], seeds=[0, 1234])
    token_ids, logprobs = sample(logits, parameters, device)
    expected, _ = reference.sample_tokens(logits, all_slots(2), **parameters)
    assert token_ids.tolist() == expected.tolist()
    assert token_ids[0] == logits[0].argmax()
    assert token_ids[1] % 2 == 1
    assert logprobs.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_row_stride_and_address(dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(11)
    parameters = mixed_parameters(16, generator)
    on_device = to_device(parameters, device)
    whole = (torch.randn(16 * 3, 2100, generator=generator) * 3).to(dtype).to(device)
    for view in (whole[::3, :2048], whole[:16, 1:2000], whole[:16, 7:8], whole[16:32, 2:2099]):
        tight = view.contiguous()
        expected = ops.sample_tokens(tight, all_slots(16, device), **on_device)
        assert torch.equal(ops.sample_tokens(view, all_slots(16, device), **on_device), expected)
        oracle, _ = reference.sample_tokens(tight, all_slots(16), **parameters)
        assert expected.tolist() == oracle.tolist()
    one = whole[0].expand(16, -1)
    expected = ops.sample_tokens(one.contiguous(), all_slots(16, device), **on_device)
    assert torch.equal(ops.sample_tokens(one, all_slots(16, device), **on_device), expected)


def test_no_rows(device: torch.device) -> None:
    out = ops.sample_tokens(
        torch.empty(0, 32, device=device), all_slots(0, device), **slot_parameters(4, device)
    )
    assert out.shape == (0,)
    assert out.dtype == torch.int64


def test_the_stream_is_philox_at_the_position_keyed_by_the_seed(device: torch.device) -> None:
    """Over 2^16 equal logits the token is the upper 16 bits of the random number."""
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822 - 2**63]
    positions = [0, 0, 2**32, 2**63 - 1, 7, 0x85A308D3243F6A88 - 2**63]
    logits = torch.zeros(1, 2**16).expand(len(seeds), -1)
    token_ids, _ = sample(logits, slot_parameters(6, seeds=seeds, positions=positions), device)
    pairs = zip(seeds, positions, strict=True)
    assert token_ids.tolist() == [reference.random_bits(*pair) >> 48 for pair in pairs]
    assert token_ids[0].item() == 0xE169  # of Random123's first known answer, 6627e8d5 e169c58d


@pytest.mark.slow
def test_every_instruction_set_draws_alike() -> None:
    script = (
        "import torch\n"
        "from pagedinfer import ops\n"
        "from tests.sampler.slots import all_slots, mixed_parameters\n"
        "generator = torch.Generator().manual_seed(12)\n"
        "for dtype in (torch.float32, torch.float16, torch.bfloat16):\n"
        "    logits = (torch.randn(30, 9001, generator=generator) * 3).to(dtype)\n"
        "    parameters = mixed_parameters(30, generator)\n"
        "    print(ops.sample_tokens(logits, all_slots(30), **parameters).tolist())\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PAGEDINFER_CPU_ISA": isa},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for isa in ("baseline", "avx2", "avx512")
    ]
    assert outputs[0].count("\n") == 3
    assert outputs[1:] == outputs[:1] * 2
