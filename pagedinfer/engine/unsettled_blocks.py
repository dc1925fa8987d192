"""Blocks with which the steps under way may still have to do, for work that does not wait for these steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class UnsettledBlocks:
    """What steps that were scheduled may still write, though it has been given up or made known.

    A request that ends, or gives way, may be in a step under way, which then writes its blocks; and blocks
    are made known when the step that fills them is scheduled. Steps end in their order, so a block settles
    with the last step that had been scheduled by then.

    Args:
        last_step: the last one scheduled so far. All blocks are unsettled until a later one has ended.
    """

    def __init__(self, last_step: int) -> None:
        self._step = last_step
        self._all_until = last_step
        self._ended = last_step
        self._blocks: deque[tuple[int, list[int]]] = deque()  # by the step with which they settle, ascending

    def begin(self, step: int) -> None:
        """A step is being scheduled."""
        self._step = step

    def end(self, step: int) -> None:
        """This step, and all before it, have ended."""
        self._ended = step
        while self._blocks and self._blocks[0][0] <= step:
            self._blocks.popleft()

    def add(self, blocks: list[int]) -> None:
        """These were given up or made known just now. The list must not be changed later."""
        if blocks:
            self._blocks.append((self._step, blocks))

    def all(self) -> set[int] | None:
        """The unsettled ones; None: all blocks are."""
        if self._ended <= self._all_until:
            return None
        return {block for _, blocks in self._blocks for block in blocks}

    def any_of(self, blocks: Iterable[int]) -> bool:
        """Whether one of these is unsettled."""
        unsettled = self.all()
        return unsettled is None or not unsettled.isdisjoint(blocks)
