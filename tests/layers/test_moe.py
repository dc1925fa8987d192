"""Grouped experts against one expert after another, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagedinfer.layers.moe import Experts, MixtureOfExperts
from pagedinfer.layers.placement import Placement

NUM_EXPERTS, HIDDEN, INNER = 16, 64, 32


def make_experts(device: torch.device, dtype: torch.dtype = torch.float32) -> Experts:
    placement = Placement(dtype, device)
    experts = Experts(
        NUM_EXPERTS, HIDDEN, INNER, activation="silu", names=("gate", "up", "down"), placement=placement
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return experts


def one_by_one(experts: Experts, hidden: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """In float64, token by token."""
    gate_up, down = experts.gate_up.double(), experts.down.double()
    output = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for token, (row, shares, chosen) in enumerate(zip(hidden.double(), weights, ids, strict=True)):
        for share, expert in zip(shares, chosen, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            output[token] += share.double() * (down[expert] @ (functional.silu(gate) * up))
    return output


def routing(num_tokens: int, k: int, device: torch.device, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((num_tokens, HIDDEN), generator=generator)
    weights = torch.rand((num_tokens, k), generator=generator)
    ids = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).topk(k).indices
    return hidden.to(device), weights.to(device), ids.to(device)


@pytest.mark.parametrize("k", [1, 2, 8, NUM_EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_equals_one_expert_after_another(num_tokens: int, k: int, device: torch.device) -> None:
    experts = make_experts(device)
    hidden, weights, ids = routing(num_tokens, k, device)
    expected = one_by_one(experts, hidden, weights, ids)
    torch.testing.assert_close(experts(hidden, weights, ids).double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("expert", [0, 7, NUM_EXPERTS - 1])
def test_all_tokens_may_want_one_expert(expert: int, device: torch.device) -> None:
    experts = make_experts(device)
    hidden, weights, ids = routing(20, 1, device)
    ids.fill_(expert)
    expected = one_by_one(experts, hidden, weights, ids)
    torch.testing.assert_close(experts(hidden, weights, ids).double(), expected, rtol=0, atol=2e-6)


def test_weights_of_the_k_best(device: torch.device) -> None:
    """As the reference says: softmax over all experts, then the k best, whose sum may be made one."""
    experts = make_experts(device)
    hidden = routing(9, 1, device)[0]
    for renormalize in (False, True):
        placement = Placement(torch.float32, device)
        layer = MixtureOfExperts(experts, HIDDEN, k=3, renormalize=renormalize, placement=placement)
        layer.gate.weight.copy_(torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2)))
        weights, ids = (hidden @ layer.gate.weight.T).softmax(-1).topk(3)
        if renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        expected = one_by_one(experts, hidden, weights, ids)
        torch.testing.assert_close(layer(hidden).double(), expected, rtol=0, atol=2e-6)


def test_more_experts_a_token_than_there_are() -> None:
    experts = make_experts(torch.device("cpu"))
    placement = Placement(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"num_experts_per_tok must be in \[1, 16\], got 17"):
        MixtureOfExperts(experts, HIDDEN, k=17, renormalize=False, placement=placement)


def test_the_cpu_is_not_for_graphs() -> None:
    assert make_experts(torch.device("cpu"), torch.bfloat16).waits_for_the_device


@pytest.mark.gpu
def test_a_captured_step_follows_the_routing_of_its_replay() -> None:
    device = torch.device("cuda")
    experts = make_experts(device, torch.bfloat16)
    if experts.waits_for_the_device:
        pytest.skip("torch has no grouped kernel for this GPU")
    inputs = [tensor.clone() for tensor in routing(6, 2, device)]
    inputs[0] = inputs[0].bfloat16()
    experts(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(*inputs)
    for seed in (2, 3):
        for buffer, other in zip(inputs, routing(6, 2, device, seed), strict=True):
            buffer.copy_(other)
        graph.replay()
        expected = one_by_one(experts, *inputs)
        torch.testing.assert_close(output.double(), expected, rtol=0.02, atol=0.02)
        assert torch.equal(output, experts(*inputs))
