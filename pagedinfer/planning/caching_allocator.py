"""What torch's allocator takes of a GPU's memory for tensors that come and go."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1 << 20
_GRAIN = 512  # bytes, that all sizes are rounded up to
_MOST_SMALL = _MIB  # bytes; beyond, a tensor is a large one
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB  # for large tensors below:
_LEAST_HUGE = 10 * _MIB  # these have a segment of their own, in steps of:
_HUGE_GRAIN = 2 * _MIB


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment: a tensor, or free."""

    segment: int
    start: int
    size: int
    is_free: bool = False


class CachingAllocator:
    """The rules of torch's, for one stream or one pool of CUDA graphs (c10/cuda/CUDACachingAllocator).

    It asks the GPU for segments and keeps them. A tensor gets the smallest free block that it fits in, split
    if much is left; a freed block is merged with free neighbours. Small tensors and large ones do not mix.
    """

    def __init__(self) -> None:
        self._segments: list[int] = []
        self._blocks: dict[bool, list[Block]] = {False: [], True: []}  # by whether they are for small tensors

    @property
    def reserved(self) -> int:
        """Bytes of all segments."""
        return sum(self._segments)

    def allocate(self, num_bytes: int) -> Block:
        """A block of so many bytes."""
        size = max(1, -(-num_bytes // _GRAIN)) * _GRAIN
        is_small = size <= _MOST_SMALL
        blocks = self._blocks[is_small]
        fitting = [block for block in blocks if block.is_free and block.size >= size]
        if fitting:
            block = min(fitting, key=lambda block: (block.size, block.segment, block.start))
        else:
            block = Block(len(self._segments), 0, _segment_size(size))
            self._segments.append(block.size)
            blocks.append(block)
        left = block.size - size
        if left >= _GRAIN if is_small else left > _MOST_SMALL:
            blocks.append(Block(block.segment, block.start + size, left, is_free=True))
            block.size = size
        block.is_free = False
        return block

    def free(self, *blocks: Block) -> None:
        """They are not needed any more."""
        for block in blocks:
            others = self._blocks[self._segments[block.segment] == _SMALL_SEGMENT]
            block.is_free = True
            for other in [other for other in others if other.is_free and other.segment == block.segment]:
                if other.start + other.size == block.start:
                    block.start = other.start
                elif block.start + block.size != other.start:
                    continue
                block.size += other.size
                others.remove(other)


def _segment_size(size: int) -> int:
    if size <= _MOST_SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LEAST_HUGE else -(-size // _HUGE_GRAIN) * _HUGE_GRAIN
