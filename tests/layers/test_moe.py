"""Mixtures of experts against one expert after another, and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagedinfer import ops
from pagedinfer.layers import moe as module
from pagedinfer.layers.moe import Experts, MixtureOfExperts
from pagedinfer.layers.placement import Placement

NUM_EXPERTS, HIDDEN, INNER = 16, 64, 40
TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def make_experts(device: torch.device, dtype: torch.dtype = torch.float32) -> Experts:
    placement = Placement(dtype, device)
    experts = Experts(
        NUM_EXPERTS, HIDDEN, INNER, activation="silu", names=("gate", "up", "down"), placement=placement
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return experts


def one_by_one(experts: Experts, hidden: Tensor, scores: Tensor, k: int, renormalize: bool) -> Tensor:
    """In float64, token by token."""
    weights, ids = scores.float().softmax(-1).topk(k)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = experts.gate_up.double(), experts.down.double()
    output = torch.zeros(hidden.shape, dtype=torch.float64, device=hidden.device)
    for token, (row, shares, chosen) in enumerate(zip(hidden.double(), weights, ids, strict=True)):
        for share, expert in zip(shares, chosen, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            output[token] += share.double() * (down[expert] @ (functional.silu(gate) * up))
    return output


def inputs(num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Hidden states, and scores of which no two of a token are equal."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn((num_tokens, HIDDEN), generator=generator)
    scores = torch.rand((num_tokens, NUM_EXPERTS), generator=generator).argsort(-1) * 0.25 - 2.0
    return hidden.to(device, dtype), scores.to(device, dtype)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("k", [1, 2, 8, NUM_EXPERTS])
@pytest.mark.parametrize("num_tokens", [1, 3, 50])
def test_equals_one_expert_after_another(
    num_tokens: int, k: int, renormalize: bool, device: torch.device
) -> None:
    experts = make_experts(device)
    hidden, scores = inputs(num_tokens, device, torch.float32)
    expected = one_by_one(experts, hidden, scores, k, renormalize)
    found = experts(hidden, scores, k, renormalize)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=4e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("few", [0, 10**9])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_either_way_on_a_gpu(dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's grouped GEMM and our kernels, whatever the number of tokens."""
    monkeypatch.setattr(module, "_FEW_PAIRS", few)
    device = torch.device("cuda")
    experts = make_experts(device, dtype)
    for num_tokens in (1, 7, 100):
        hidden, scores = inputs(num_tokens, device, dtype)
        expected = one_by_one(experts, hidden, scores, 4, True)
        found = experts(hidden, scores, 4, True)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCES[dtype])


def test_the_router_is_a_projection(device: torch.device) -> None:
    placement = Placement(torch.float32, device)
    experts = make_experts(device)
    layer = MixtureOfExperts(experts, HIDDEN, k=3, renormalize=True, placement=placement)
    layer.gate.weight.copy_(torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(2)))
    hidden, _ = inputs(9, device, torch.float32)
    expected = one_by_one(experts, hidden, hidden @ layer.gate.weight.T, 3, True)
    torch.testing.assert_close(layer(hidden).double(), expected, rtol=0, atol=4e-6)


def test_more_experts_a_token_than_there_are() -> None:
    experts = make_experts(torch.device("cpu"))
    placement = Placement(torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"num_experts_per_tok must be in \[1, 16\], got 17"):
        MixtureOfExperts(experts, HIDDEN, k=17, renormalize=False, placement=placement)


def test_the_cpu_is_not_for_graphs() -> None:
    assert make_experts(torch.device("cpu"), torch.bfloat16).waits_for_the_device


@pytest.mark.gpu
@pytest.mark.parametrize("few", [0, 10**9])
def test_a_captured_step_follows_the_routing_of_its_replay(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEW_PAIRS", few)
    device = torch.device("cuda")
    experts = make_experts(device, torch.bfloat16)
    if few == 0 and not experts.has_grouped_gemm:
        pytest.skip("torch has no grouped kernel for this GPU")
    buffers = inputs(6, device, torch.bfloat16)
    experts(*buffers, 2, True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = experts(*buffers, 2, True)
    for seed in (2, 3):
        for buffer, other in zip(buffers, inputs(6, device, torch.bfloat16, seed), strict=True):
            buffer.copy_(other)
        graph.replay()
        expected = one_by_one(experts, *buffers, 2, True)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=3e-2)
        assert torch.equal(output, experts(*buffers, 2, True))


# ---- the ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_rows", [16, 64])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(1, 8, 2), (70, 128, 8), (900, 5, 1), (33, 512, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_routing(
    num_tokens: int, num_experts: int, k: int, block_rows: int, dtype: torch.dtype, device: torch.device
) -> None:
    """With equal scores among the halves: the lower expert comes first."""
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randn((num_tokens, num_experts), generator=generator).to(dtype).to(device)
    routing = ops.route_experts(scores, k, renormalize=False, block_rows=block_rows)
    probabilities = scores.float().softmax(-1)
    best = scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    assert torch.equal(routing.experts.long(), best)
    torch.testing.assert_close(routing.weights, probabilities.gather(1, best), rtol=1e-5, atol=0)
    shares = ops.route_experts(scores, k, renormalize=True, block_rows=block_rows).weights
    expected = routing.weights / routing.weights.sum(-1, keepdim=True)
    torch.testing.assert_close(shares, expected, rtol=1e-5, atol=0)

    pairs = routing.pairs.tolist()
    assert sorted(pairs) == list(range(num_tokens * k))
    of_pairs = routing.experts.flatten()[routing.pairs.long()].tolist()
    assert of_pairs == sorted(of_pairs)
    covered: list[int] = []
    for expert, begin, end in routing.tiles.tolist():
        if expert >= 0:
            assert 0 < end - begin <= block_rows
            assert set(of_pairs[begin:end]) == {expert}
            covered += range(begin, end)
    assert covered == list(range(num_tokens * k))


def test_scores_that_are_no_numbers_harm_no_other_token(device: torch.device) -> None:
    scores = torch.zeros(4, 6, device=device)
    scores[1] = torch.nan
    scores[2] = -torch.inf
    scores[3, 4] = 1.0
    routing = ops.route_experts(scores, 2, renormalize=True)
    assert all(0 <= expert < 6 for expert in routing.experts.flatten().tolist())
    assert sorted(routing.pairs.tolist()) == list(range(8))
    assert routing.experts[[0, 3]].tolist() == [[0, 1], [4, 0]]


@pytest.mark.parametrize(
    ("num_tokens", "block_rows", "sizes"),
    [
        *((n, 16, sizes) for n in (1, 40) for sizes in ((64, 40), (200, 72), (8, 8), (1024, 136))),
        *((n, 64, sizes) for n in (90, 300) for sizes in ((64, 40), (8, 8))),
        pytest.param(90, 64, (200, 72), marks=pytest.mark.gpu),
        pytest.param(300, 64, (1024, 136), marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_expert_mlp(
    dtype: torch.dtype, num_tokens: int, block_rows: int, sizes: tuple[int, int], device: torch.device
) -> None:
    """Widths that no tile divides, and experts with no token or many."""
    if device.type == "cuda" and dtype == torch.float32:
        pytest.skip("the kernels are made for half types")
    (hidden_size, inner), num_experts, k = sizes, 6, 2
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype).to(device)

    hidden = random(num_tokens, hidden_size) * hidden_size**0.5
    gate_up, down = random(num_experts, 2 * inner, hidden_size), random(num_experts, hidden_size, inner)
    scores = random(num_tokens, num_experts)
    scores[:, 3] = 5.0  # all go there, and none to the last
    scores[:, 5] = -5.0
    routing = ops.route_experts(scores, k, renormalize=True, block_rows=block_rows)
    found = ops.expert_mlp(hidden, gate_up, down, routing)
    expected = torch.zeros(hidden.shape, dtype=torch.float64, device=device)
    for rank in range(k):
        chosen = routing.experts[:, rank].long()
        product = torch.einsum("tnh,th->tn", gate_up[chosen].double(), hidden.double())
        gate, up = product.chunk(2, -1)
        result = torch.einsum("thn,tn->th", down[chosen].double(), functional.silu(gate) * up)
        expected += routing.weights[:, rank, None].double() * result
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    scores = torch.zeros(3, 4, device=device)
    with pytest.raises(ValueError, match="weights have 5 experts a token; expected 1 to 4"):
        ops.route_experts(scores, 5, renormalize=False)
    dtype = torch.bfloat16
    hidden = torch.zeros(3, 16, device=device, dtype=dtype)
    routing = ops.route_experts(scores.to(dtype), 2, renormalize=False)
    with pytest.raises(ValueError, match=r"expert_gate_up: weight has shape \[4, 17, 16\]; expected twice"):
        ops.expert_mlp(
            hidden,
            torch.zeros(4, 17, 16, device=device, dtype=dtype),
            torch.zeros(4, 16, 8, device=device, dtype=dtype),
            routing,
        )
