"""What sample_tokens refuses, and how the op looks to torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedinfer import ops
from tests.sampler.slots import all_slots, mixed_parameters, slot_parameters, to_device


def arguments(device: torch.device) -> dict[str, Any]:
    return {
        "logits": torch.randn(3, 40, device=device),
        "slots": all_slots(3, device),
        **slot_parameters(5, device),
    }


def test_the_arguments_are_fine_as_they_are(device: torch.device) -> None:
    assert ops.sample_tokens(**arguments(device)).shape == (3,)


def with_strides(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device, its strides kept, as `to` would not."""
    there = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return there.copy_(tensor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.randn(3, 40).double()}, "logits has dtype float64; expected float32, float16"),
        ({"logits": torch.randn(40)}, r"logits has shape \[40\]; expected \[num_rows, columns\]"),
        ({"logits": torch.randn(40, 3).t()}, r"logits has shape \[3, 40\] and strides \[1, 3\]"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, "slots has dtype int64; expected int32"),
        ({"slots": torch.zeros(2, dtype=torch.int32)}, r"slots has shape \[2\]; expected \[num_rows=3\]"),
        ({"temperature": torch.ones(5).double()}, "temperature has dtype float64; expected float32"),
        ({"top_k": torch.ones(5).long()}, "top_k has dtype int64; expected int32"),
        ({"top_p": torch.ones(4)}, r"top_p has shape \[4\]; expected \[num_slots=5\]"),
        ({"min_p": torch.ones(5, 1)}, r"min_p has shape \[5, 1\]; expected \[num_slots=5\]"),
        ({"min_p": torch.ones(10)[::2]}, r"min_p has shape \[5\] and strides \[2\]; expected contiguous"),
        ({"seeds": torch.ones(5).int()}, "seeds has dtype int32; expected int64"),
        ({"positions": torch.ones(5).int()}, "positions has dtype int32; expected int64"),
        ({"vocab_size": 0}, "vocab_size is 0; expected 1 to 40"),
        ({"vocab_size": 41}, "vocab_size is 41; expected 1 to 40, the columns of logits"),
        ({"token_ids": torch.zeros(3, dtype=torch.int32)}, "token_ids has dtype int32; expected int64"),
        ({"logprobs": torch.zeros(4)}, r"logprobs has shape \[4\]; expected \[num_rows=3\]"),
        ({"workspace": torch.zeros(8)}, "workspace has dtype float32; expected uint8"),
    ],
)
def test_refuses(changes: dict[str, Any], message: str, device: torch.device) -> None:
    moved = {k: with_strides(v, device) if isinstance(v, torch.Tensor) else v for k, v in changes.items()}
    with pytest.raises(ValueError, match=f"sample_tokens: {message}"):
        ops.sample_tokens(**(arguments(device) | moved))


def test_refuses_a_vocabulary_whose_weights_could_overflow(device: torch.device) -> None:
    logits = torch.zeros(1, 1, device=device).expand(1, 2**19 + 1)
    with pytest.raises(ValueError, match="strides"):
        ops.sample_tokens(logits, all_slots(1, device), **slot_parameters(1, device))
    logits = torch.zeros(1, 2**19 + 1, device=device)
    with pytest.raises(ValueError, match="vocab_size is 524289; expected at most 524288"):
        ops.sample_tokens(logits, all_slots(1, device), **slot_parameters(1, device))


@pytest.mark.parametrize("slot", [-2, 5])
def test_refuses_a_slot_out_of_range_on_the_cpu(slot: int) -> None:
    changes = {"slots": torch.tensor([0, slot, 1], dtype=torch.int32)}
    with pytest.raises(ValueError, match=rf"slots\[1\] is {slot}; expected -1 \(padding\) or a slot below 5"):
        ops.sample_tokens(**(arguments(torch.device("cpu")) | changes))


@pytest.mark.gpu
def test_refuses_tensors_on_two_devices() -> None:
    changes = {"seeds": torch.zeros(5, dtype=torch.int64)}
    with pytest.raises(ValueError, match="seeds is on cpu; expected cuda:0, where logits is"):
        ops.sample_tokens(**(arguments(torch.device("cuda")) | changes))


def test_uses_the_tensors_that_it_is_given(device: torch.device) -> None:
    args = arguments(device)
    token_ids = torch.full((3,), -9, device=device)
    size = ops.sample_tokens_workspace_size(args["logits"])
    workspace = torch.empty(size + 16, dtype=torch.uint8, device=device)
    out = ops.sample_tokens(**args, token_ids=token_ids, workspace=workspace)
    assert out is token_ids
    assert (out >= 0).all()


def test_leaves_its_inputs_as_they_are(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 700, generator=generator).to(device)
    parameters = to_device(mixed_parameters(16, generator), device)
    before = logits.clone(), {name: value.clone() for name, value in parameters.items()}
    ops.sample_tokens(logits, all_slots(16, device), **parameters)
    assert torch.equal(logits, before[0])
    assert all(torch.equal(parameters[name], value) for name, value in before[1].items())


def test_opcheck(device: torch.device) -> None:
    args = arguments(device)
    outputs = {
        "vocab_size": 40,
        "workspace": torch.empty(
            ops.sample_tokens_workspace_size(args["logits"]), dtype=torch.uint8, device=device
        ),
        "token_ids": torch.zeros(3, dtype=torch.int64, device=device),
    }
    op = torch.ops.pagedinfer.sample_tokens.default
    for logprobs in (None, torch.zeros(3, device=device)):
        torch.library.opcheck(op, (*args.values(), *outputs.values(), logprobs))
