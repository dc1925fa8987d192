"""Penalties, biases and masks in sample_tokens: against the oracle and transformers' processors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from pagedinfer import ops
from pagedinfer.ops import LogitsChange, LogitsChanges
from tests import reference
from tests.sampler.slots import all_slots, mixed_parameters, slot_parameters, to_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EVERY_KIND = LogitsChange.PENALTIES | LogitsChange.BIAS | LogitsChange.MASK
PROMPT = -0x8000


def random_changes(num_slots: int, vocab_size: int, generator: torch.Generator) -> LogitsChanges:
    """Each slot with some of the kinds, or none; on the CPU."""

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(num_slots).uniform_(low, high, generator=generator)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, (num_slots, *shape), generator=generator)

    counts = integers(-50, 4, vocab_size + 3).clamp(min=0)
    counts |= torch.where(integers(0, 10, vocab_size + 3) == 0, PROMPT, 0)
    return LogitsChanges(
        kinds=integers(0, 8).int(),
        repetition_penalty=uniform(0.5, 2.0),
        presence_penalty=uniform(-2.0, 2.0),
        frequency_penalty=uniform(-2.0, 2.0),
        bias_ids=torch.stack(
            [torch.randperm(vocab_size + 40, generator=generator)[:20] - 20 for _ in range(num_slots)]
        ).int(),
        bias=uniform(-20.0, 20.0)[:, None] * torch.rand(num_slots, 20, generator=generator),
        token_counts=counts.to(torch.int16),
        allowed=integers(-(2**31), 2**31 - 1, vocab_size // 32 + 2).int(),
    )


def no_changes(num_slots: int, device: torch.device | str = "cpu") -> LogitsChanges:
    """Of every slot; to be filled in with `replace`."""
    return LogitsChanges(
        kinds=torch.zeros(num_slots, dtype=torch.int32, device=device),
        repetition_penalty=torch.ones(num_slots, device=device),
        presence_penalty=torch.zeros(num_slots, device=device),
        frequency_penalty=torch.zeros(num_slots, device=device),
        bias_ids=torch.empty(num_slots, 0, dtype=torch.int32, device=device),
        bias=torch.empty(num_slots, 0, device=device),
    )


def on_device(changes: LogitsChanges, device: torch.device | str) -> LogitsChanges:
    """A copy, since counts are written."""
    tensors = {field.name: getattr(changes, field.name) for field in fields(changes)}
    return LogitsChanges(**{k: v if v is None else v.clone().to(device) for k, v in tensors.items()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 40, 1000, 5003])
def test_equals_oracle(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_rows = 48
    logits = (torch.randn(num_rows, vocab_size + 5, generator=generator) * 3).to(dtype)
    parameters = mixed_parameters(num_rows, generator)
    changes = random_changes(num_rows, vocab_size, generator)
    moved = on_device(changes, device)
    logprobs = torch.empty(num_rows, device=device)
    token_ids = ops.sample_tokens(
        logits.to(device),
        all_slots(num_rows, device),
        **to_device(parameters, device),
        vocab_size=vocab_size,
        logprobs=logprobs,
        changes=moved,
    ).cpu()
    expected, expected_logprobs = reference.sample_tokens(
        logits, all_slots(num_rows), **parameters, vocab_size=vocab_size, changes=changes
    )
    assert token_ids.tolist() == expected.tolist()
    torch.testing.assert_close(
        logprobs.cpu(), expected_logprobs.float(), atol=1e-5, rtol=1e-6, equal_nan=True
    )
    counts = changes.token_counts
    assert counts is not None
    assert moved.token_counts is not None
    for row, token in enumerate(token_ids.tolist()):
        if token >= 0 and changes.kinds[row] & LogitsChange.PENALTIES:
            counts[row, token] += 1
    assert torch.equal(moved.token_counts.cpu(), counts)


def test_slots_without_changes_are_sampled_as_ever(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(30, 2000, generator=generator).to(device)
    parameters = to_device(mixed_parameters(40, generator), device)
    slots = torch.randperm(40, generator=generator)[:30].int()
    slots[[3, 17]] = -1
    slots = slots.to(device)
    changes = random_changes(40, 2000, generator)
    plain = ops.sample_tokens(logits, slots, **parameters)
    changed = ops.sample_tokens(logits, slots, **parameters, changes=on_device(changes, device))
    as_ever = (changes.kinds[slots.cpu().clamp(min=0).long()] == 0) | (slots.cpu() < 0)
    assert 3 <= as_ever.sum() <= 15
    assert torch.equal(changed.cpu()[as_ever], plain.cpu()[as_ever])
    assert not torch.equal(changed, plain)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 5.0])
def test_repetition_penalty_is_transformers(penalty: float, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(8, 300, generator=generator) * 2
    prompt = torch.randint(300, (8, 20), generator=generator)
    generated = torch.randint(300, (8, 9), generator=generator)
    seen = torch.cat([prompt, generated], dim=1)
    expected = logits_process.RepetitionPenaltyLogitsProcessor(penalty)(seen, logits).argmax(-1)

    counts = torch.zeros(8, 300, dtype=torch.int16, device=device)
    for slot in range(8):
        ops.set_token_counts(counts, slot, prompt[slot].to(device), generated[slot].to(device))
    changes = replace(
        no_changes(8, device),
        kinds=torch.full((8,), LogitsChange.PENALTIES, dtype=torch.int32, device=device),
        repetition_penalty=torch.full((8,), penalty, device=device),
        token_counts=counts,
    )
    greedy = slot_parameters(8, device, temperature=0.0)
    drawn = ops.sample_tokens(logits.to(device), all_slots(8, device), **greedy, changes=changes)
    assert drawn.tolist() == expected.tolist()


def test_biases_and_bans_are_transformers(device: torch.device) -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    best = logits[0].topk(3).indices.tolist()
    biases = {best[0]: -5.0, best[1]: -0.25, 7: 3.5, 8: 1.0}
    processor = logits_process.SequenceBiasLogitsProcessor([[[t], b] for t, b in biases.items()])
    changed = processor(torch.zeros(1, 1, dtype=torch.long), logits)
    changed = logits_process.SuppressTokensLogitsProcessor([7])(torch.zeros(1, 1).long(), changed)
    biases[7] = -math.inf

    changes = replace(
        no_changes(1, device),
        kinds=torch.tensor([LogitsChange.BIAS], dtype=torch.int32, device=device),
        bias_ids=torch.tensor([[-1, *biases]], dtype=torch.int32, device=device),
        bias=torch.tensor([[99.0, *biases.values()]], device=device),
    )
    greedy = slot_parameters(1, device, temperature=0.0)
    drawn = ops.sample_tokens(logits.to(device), all_slots(1, device), **greedy, changes=changes)
    assert drawn.item() == changed.argmax()


def draws_over_time(
    logits: Sequence[float], steps: int, device: torch.device, *, presence: float, frequency: float
) -> list[int]:
    """Greedy tokens of one slot, each of which counts for the next ones."""
    changes = replace(
        no_changes(1, device),
        kinds=torch.tensor([LogitsChange.PENALTIES], dtype=torch.int32, device=device),
        presence_penalty=torch.tensor([presence], device=device),
        frequency_penalty=torch.tensor([frequency], device=device),
        token_counts=torch.zeros(1, len(logits), dtype=torch.int16, device=device),
    )
    greedy = slot_parameters(1, device, temperature=0.0)
    row = torch.tensor([logits], device=device)
    return [
        int(ops.sample_tokens(row, all_slots(1, device), **greedy, changes=changes)) for _ in range(steps)
    ]


def test_drawn_tokens_count_at_once(device: torch.device) -> None:
    logits = [3.0, 2.25, 1.5]
    assert draws_over_time(logits, 6, device, presence=0.0, frequency=0.0) == [0] * 6
    # Once drawn, a token stands a full 1 lower, and no lower than that.
    assert draws_over_time(logits, 5, device, presence=1.0, frequency=0.0) == [0, 1, 0, 0, 0]
    # With every draw half a point lower: 3, 2.5, then 2.25 of the other, 2, 1.75 of the other, 1.5 (a tie).
    assert draws_over_time(logits, 6, device, presence=0.0, frequency=0.5) == [0, 0, 1, 0, 1, 0]


def test_counts_stop_at_the_top(device: torch.device) -> None:
    counts = torch.tensor([[0x7FFF, 0], [-1, 0]], dtype=torch.int16, device=device)
    changes = replace(
        no_changes(2, device),
        kinds=torch.full((2,), LogitsChange.PENALTIES, dtype=torch.int32, device=device),
        token_counts=counts,
    )
    logits = torch.tensor([[5.0, 0.0], [5.0, 0.0]], device=device)
    greedy = slot_parameters(2, device, temperature=0.0)
    assert ops.sample_tokens(logits, all_slots(2, device), **greedy, changes=changes).tolist() == [0, 0]
    assert counts.tolist() == [[0x7FFF, 0], [-1, 0]]


def test_set_token_counts(device: torch.device) -> None:
    counts = torch.full((3, 6), 77, dtype=torch.int16, device=device)
    prompt = torch.tensor([2, 2, 3], device=device)
    generated = torch.tensor([3, 5, 3], device=device)
    ops.set_token_counts(counts, 1, prompt, generated)
    assert counts.tolist() == [[77] * 6, [0, 0, PROMPT, PROMPT + 2, 0, 1], [77] * 6]
    ops.set_token_counts(counts, 1, prompt[:0], torch.full((40_000,), 4, device=device))
    assert counts[1].tolist() == [0, 0, 0, 0, 0x7FFF, 0]


def test_a_mask_that_leaves_nothing_fails_alone(device: torch.device) -> None:
    allowed = torch.zeros(3, 4, dtype=torch.int32, device=device)
    allowed[1, 2] = 1 << 5
    changes = replace(
        no_changes(3, device),
        kinds=torch.tensor([LogitsChange.MASK, LogitsChange.MASK, 0], dtype=torch.int32, device=device),
        allowed=allowed,
    )
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(4)).to(device)
    logprobs = torch.empty(3, device=device)
    drawn = ops.sample_tokens(
        logits, all_slots(3, device), **slot_parameters(3, device), logprobs=logprobs, changes=changes
    )
    assert drawn[:2].tolist() == [-1, 69]
    assert drawn[2] >= 0
    assert logprobs.isnan().tolist() == [True, False, False]
    torch.testing.assert_close(logprobs[1], logits[1].log_softmax(-1)[69])  # of the raw logits


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kinds": torch.zeros(5).long()}, "kinds has dtype int64; expected int32"),
        (
            {"repetition_penalty": torch.ones(4)},
            r"repetition_penalty has shape \[4\]; expected \[num_slots=5\]",
        ),
        ({"bias": torch.ones(5, 2)}, r"bias has shape \[5, 2\]; expected \[num_slots=5, max_biases=0\]"),
        ({"token_counts": torch.zeros(5, 40).int()}, "token_counts has dtype int32; expected int16"),
        (
            {"token_counts": torch.zeros(5, 39).to(torch.int16)},
            "token_counts has 39 columns; expected vocab_size=40 or more",
        ),
        ({"allowed": torch.zeros(5, 1).int()}, "allowed has 1 columns of 32 tokens; expected 2 or more"),
    ],
)
def test_refuses(wrong: dict[str, Tensor], message: str, device: torch.device) -> None:
    moved = {name: tensor.to(device) for name, tensor in wrong.items()}
    changes = replace(no_changes(5, device), **moved)
    with pytest.raises(ValueError, match=f"sample_tokens: {message}"):
        ops.sample_tokens(
            torch.randn(3, 40, device=device),
            all_slots(3, device),
            **slot_parameters(5, device),
            changes=changes,
        )


def test_refuses_a_small_workspace(device: torch.device) -> None:
    logits = torch.randn(3, 41, device=device)
    size = ops.sample_tokens_workspace_size(logits, changes=True)
    with pytest.raises(ValueError, match=f"workspace has {size - 1} bytes; expected {size} or more"):
        ops.sample_tokens(
            logits,
            all_slots(3, device),
            **slot_parameters(3, device),
            workspace=torch.empty(size - 1, dtype=torch.uint8, device=device),
            changes=no_changes(3, device),
        )


def test_opcheck(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 40, device=device)
    changes = on_device(random_changes(3, 40, generator), device)
    workspace = torch.empty(
        ops.sample_tokens_workspace_size(logits, changes=True), dtype=torch.uint8, device=device
    )
    torch.library.opcheck(
        torch.ops.pagedinfer.sample_tokens.default,
        (
            logits,
            all_slots(3, device),
            *slot_parameters(3, device).values(),
            40,
            workspace,
            torch.zeros(3, dtype=torch.int64, device=device),
            torch.zeros(3, device=device),
            changes.kinds,
            changes.repetition_penalty,
            changes.presence_penalty,
            changes.frequency_penalty,
            changes.token_counts,
            changes.bias_ids,
            changes.bias,
            changes.allowed,
        ),
        # Its inputs differ from run to run: the counts are written.
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 128_256), (30, 49_152), (300, 5000)])
def test_cpu_and_cuda_agree(num_rows: int, vocab_size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = (torch.randn(num_rows, vocab_size, generator=generator) * 3).to(dtype)
    parameters = mixed_parameters(num_rows, generator)
    changes = random_changes(num_rows, vocab_size, generator)
    if num_rows == 1:
        changes = replace(changes, kinds=torch.tensor([EVERY_KIND], dtype=torch.int32))
    copy = on_device(changes, "cuda")
    logprobs = torch.empty(num_rows), torch.empty(num_rows, device="cuda")
    on_cuda = ops.sample_tokens(
        logits.cuda(),
        all_slots(num_rows, "cuda"),
        **to_device(parameters, "cuda"),
        changes=copy,
        logprobs=logprobs[1],
    )
    on_cpu = ops.sample_tokens(
        logits, all_slots(num_rows), **parameters, changes=changes, logprobs=logprobs[0]
    )
    assert on_cuda.tolist() == on_cpu.tolist()
    torch.testing.assert_close(logprobs[1].cpu(), logprobs[0], atol=1e-5, rtol=1e-6, equal_nan=True)
    assert copy.token_counts is not None
    assert changes.token_counts is not None
    assert torch.equal(copy.token_counts.cpu(), changes.token_counts)
