"""Activations by the names that config.json files give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional

from pagedinfer import ops

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = partial(functional.gelu, approximate="tanh")

_ACTIVATIONS: Mapping[str, Activation] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": functional.silu,
}


def _gated(activation: Activation) -> Activation:
    def apply(input: Tensor) -> Tensor:
        gate, up = input.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


_GATED: Mapping[str, Activation] = {
    "silu": ops.silu_and_mul,
    "gelu_pytorch_tanh": _gated(_gelu_tanh),
}


def activation(name: str) -> Activation:
    """The activation that a config calls `name`: [..., n] -> [..., n].

    Raises:
        ValueError: an unknown one; the message lists the known ones.
    """
    return _find(name, _ACTIVATIONS, "activation")


def gated_activation(name: str) -> Activation:
    """activation(first half) * second half (Shazeer, 2020): [..., 2 * n] -> [..., n].

    Raises:
        ValueError: an unknown one; the message lists the known ones.
    """
    return _find(name, _GATED, "gated activation")


def _find(name: str, known: Mapping[str, Activation], kind: str) -> Activation:
    if name not in known:
        raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(known)}")
    return known[name]
