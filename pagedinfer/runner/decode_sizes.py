"""Which sizes of decode steps there are graphs for. Torch-free."""

from __future__ import annotations

_LARGEST = 512  # beyond it a step takes the GPU longer than its launches take the host


def decode_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of rows that decodes are padded to, ascending: at most seven more than needed up to 256.

    The time of a small batch hardly depends on its size, so that padding costs little; with steps of 8, 45
    graphs serve everything up to 512.
    """
    largest = min(max_num_seqs, _LARGEST)
    sizes = {1, 2, 4, *range(8, 257, 8), *range(288, _LARGEST + 1, 32), largest}
    return sorted(size for size in sizes if size <= largest)
