"""What a layer takes from a tensor of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored tensor, and the memory of the layer that it fills; both have one shape."""

    source: tuple[slice, ...]
    destination: Tensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as checkpoints have it, and those parts of it that this rank needs."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    pieces: Sequence[Piece]

    @classmethod
    def whole(cls, destination: Tensor) -> StoredTensor:
        """All of it."""
        shape = tuple(destination.shape)
        return cls(shape, [Piece(tuple(slice(0, size) for size in shape), destination)])
