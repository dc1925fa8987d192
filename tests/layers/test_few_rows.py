"""The parts of a decoder layer over few rows against the layer in its usual form."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedinfer import ops
from pagedinfer.layers import few_rows
from pagedinfer.layers.linear import Linear
from pagedinfer.layers.mlp import GatedMLP
from pagedinfer.layers.norm import RMSNorm
from pagedinfer.layers.placement import Placement
from tests.models.harness import load
from tests.tiny_models import make_llama


def random_weights(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_(std=parameter.shape[-1] ** -0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_gated_mlp(device: torch.device, activation: str, bias: bool) -> None:
    placement = Placement(torch.float32, device)
    mlp = GatedMLP(64, 96, activation=activation, bias=bias, placement=placement)
    norm = RMSNorm(64, 1e-5, placement=placement)
    random_weights(mlp)
    random_weights(norm)
    stream = torch.randn(3, 64, device=device)
    wanted = stream + mlp(norm(stream))
    mlp.add_to(stream, norm)
    torch.testing.assert_close(stream, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}],
    ids=["plain", "biases", "tied"],
)
def test_a_model_takes_either_way(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, and decodes of up to four sequences; what is served is told by rows alone here."""
    make_llama(tmp_path, **options)
    prompts = [[1, 2, 3], [7, 5, 4, 9, 8, 6], [11]]
    wanted = load(tmp_path).logits(prompts, chunk=1)

    served = 0

    def by_rows(input: torch.Tensor) -> bool:
        nonlocal served
        served += input.shape[0] <= few_rows.MAX_ROWS_NARROW
        return input.shape[0] <= few_rows.MAX_ROWS_NARROW

    monkeypatch.setattr(few_rows, "served", by_rows)
    for chunk in (1, 2):
        got = load(tmp_path).logits(prompts, chunk=chunk)
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert served > 0


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
