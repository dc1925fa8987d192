"""Which sizes of steps there are CUDA graphs for. Torch-free."""

from __future__ import annotations

_MOST_DECODES = 512  # beyond it a step takes the GPU longer than its launches take the host
_MOST_TOKENS = 2048  # the same, for the smallest of models


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows that decodes are padded to, ascending: at most seven more than needed up to 256.

    The time of a small batch hardly depends on its size, so that padding costs little; with steps of 8, 45
    graphs serve everything up to 512.
    """
    largest = min(max_num_seqs, _MOST_DECODES)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, _MOST_DECODES + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)


def forward_sizes(max_num_batched_tokens: int) -> list[int]:
    """The numbers of tokens that other steps are padded to, ascending.

    Products are computed in tiles of 64 or 128 rows, so that padding to a multiple of that is nearly free.
    """
    largest = min(max_num_batched_tokens, _MOST_TOKENS)
    sizes = {1, 4, 16, 32, *range(64, 1025, 64), *range(1152, _MOST_TOKENS + 1, 128), largest}
    return sorted(size for size in sizes if size <= largest)
