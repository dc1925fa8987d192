"""The prefixes that a step's requests share, on their way to the attention op."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import SharedPrefix

_GROUPS = SharedPrefix.MAX_GROUPS  # a fixed number, as a CUDA graph wants it

PACKED_PREFIXES = 2 * _GROUPS + 1
"""Elements of what `pack_prefixes` gives."""


def pack_prefixes(prefixes: Sequence[SharedPrefix]) -> npt.NDArray[np.int32] | None:
    """int32: where each group's rows begin, and its tokens; unused groups are empty. None: no group."""
    if not prefixes:
        return None
    packed = np.zeros(PACKED_PREFIXES, np.int32)
    starts, lens = packed[: _GROUPS + 1], packed[_GROUPS + 1 :]
    counts = [prefix.num_requests for prefix in prefixes]
    starts[1 : len(counts) + 1] = np.cumsum(counts)
    starts[len(counts) + 1 :] = starts[len(counts)]
    lens[: len(counts)] = [prefix.num_tokens for prefix in prefixes]
    return packed


def unpack_prefixes(packed: Tensor) -> ops.SharedPrefixes:
    """What `pack_prefixes` gave, on the device."""
    return ops.SharedPrefixes(packed[: _GROUPS + 1], packed[_GROUPS + 1 :])
