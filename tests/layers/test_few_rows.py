"""The parts of a decoder layer over few rows against the layer in its usual form."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from pagedinfer import ops
from pagedinfer.layers import few_rows
from pagedinfer.layers.attention import PlansOnDemand
from pagedinfer.layers.linear import Linear
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.placement import Placement
from tests.models.families import CASES, make
from tests.models.harness import few_rows_served, load
from tests.models.parity import random_prompts


def random_weights(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("inner", [96, 90], ids=["fits the kernel", "no multiple of 16 bytes"])
def test_gated_mlp(device: torch.device, inner: int, activation: str, bias: bool) -> None:
    placement = Placement(torch.float32, device)
    mlp = GatedMLP(64, inner, activation=activation, bias=bias, placement=placement)
    norm = RMSNorm(64, 1e-5, placement=placement)
    random_weights(mlp)
    random_weights(norm)
    stream = torch.randn(3, 64, device=device)
    wanted = stream + mlp(norm(stream))
    mlp.add_to(stream, norm)
    torch.testing.assert_close(stream, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("OPT", "GPT", "Gemma"))])
def test_every_family_takes_either_way(name: str, tmp_path: Path) -> None:
    """Prompts, and decodes of up to four sequences."""
    make(tmp_path, *CASES[name])
    model = load(tmp_path)
    prompts = [[1, 2, 3], [7, 5, 4, 9, 8, 6], [11]]
    wanted = model.logits(prompts, chunk=1)
    for chunk in (1, 2):
        with few_rows_served() as served:
            got = model.logits(prompts, chunk=chunk)
        assert set(served) >= {2, 3}
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_every_family_is_as_near_in_bfloat16(name: str, tmp_path: Path) -> None:
    make(tmp_path, *CASES[name])
    prompts = random_prompts((5, 9))
    exact = load(tmp_path).logits(prompts)
    model = load(tmp_path, device="cuda", dtype=torch.bfloat16)
    errors = []
    for most in (few_rows.MAX_ROWS, 0):
        with few_rows_served(most):
            found = model.logits(prompts, chunk=1)
        pairs = zip(found, exact, strict=True)
        errors.append(sum(float((a.float().cpu() - b).abs().mean()) for a, b in pairs))
    ours, torchs = errors
    assert ours <= 1.5 * torchs + 1e-3


def test_the_cpu_keeps_torchs_linear() -> None:
    assert not few_rows.served(torch.ones(1, 64).bfloat16())


@pytest.mark.gpu
def test_which_inputs_are_served() -> None:
    row = torch.ones(4, 64, device="cuda", dtype=torch.bfloat16)
    assert few_rows.served(row)
    assert few_rows.served(row[:1].half())
    assert not few_rows.served(row.float())
    assert not few_rows.served(torch.ones(5, 64, device="cuda", dtype=torch.bfloat16))
    assert not few_rows.served(row[:, :63])
    wide = torch.ones(4, 4096, device="cuda", dtype=torch.bfloat16)
    assert few_rows.served(wide[:2])
    assert not few_rows.served(wide[:3])


@pytest.mark.gpu
def test_linear_of_rows_that_are_not_aligned() -> None:
    placement = Placement(torch.bfloat16, torch.device("cuda"))
    layer = Linear(64, 10, bias=True, placement=placement)
    random_weights(layer)
    wide = torch.randn(2, 70, device="cuda").bfloat16()
    for input in (wide[:, 1:65], wide[:, 3:67].contiguous()):
        wanted = copy.deepcopy(layer).float()(input.float())
        torch.testing.assert_close(layer(input).float(), wanted, rtol=2e-2, atol=2e-2)


def test_the_kernel_takes_as_many_rows_as_are_served() -> None:
    assert few_rows.MAX_ROWS <= few_rows.MAX_ROWS_NARROW <= ops.MAX_SKINNY_ROWS


def test_a_plan_is_made_when_a_layer_asks_for_it() -> None:
    made: list[int] = []

    def make(window: int) -> ops.AttentionPlan:
        made.append(window)
        return ops.AttentionPlan(torch.empty(0), torch.empty(0), max_query_len=1)

    plans = PlansOnDemand(make)
    assert made == []
    assert plans[0] is plans[0]
    assert plans[7] is not plans[0]
    assert made == [0, 7]
