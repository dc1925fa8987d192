"""Types of the compiled module _core (csrc/core.cpp)."""

import numpy as np
import numpy.typing as npt

from pagedinfer.engine.batch import ScheduledRequest

def pack_decodes(
    requests: list[ScheduledRequest],
    packed: npt.NDArray[np.int32],
    num_known_tokens: npt.NDArray[np.int32],
    num_blocks: npt.NDArray[np.int32],
    block_size: int,
) -> bool:
    """Writes the slots of `requests`, their lengths with this step's token, and their new blocks (-1: none).

    False, nothing else has changed, and `packed` is of no use, if one of them computes something else than a
    token that it drew, or has more new blocks than one, or one that this token does not need.

    Args:
        requests: N of them.
        packed: [3, N], contiguous, written.
        num_known_tokens, num_blocks: [slots]; the tokens that were not drawn here, and the blocks of each
            slot, which grow by the new ones.
        block_size: tokens of a block.
    """

class BlockPool:
    """Which KV blocks of one tier are free, how often each is referenced, what full blocks hold.

    Argument errors (an id out of range, a block released twice, more asked for than is free) are
    ValueErrors. See csrc/cache/block_pool.h for the lists and for why a hash collision is harmless.
    """

    def __init__(self, num_blocks: int, block_size: int, *, hash_bits: int = 64) -> None:
        """`hash_bits` < 64 makes collisions common, for tests."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_free(self) -> int:
        """Blocks without a reference, those included that still hold a known content."""

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache can find, free or not."""

    def ref_count(self, block: int) -> int: ...
    def is_cached(self, block: int) -> bool: ...
    def hash(self, block: int) -> int:
        """Chained 64-bit hash of what a cached block and everything before it holds; 0 if not cached."""

    def num_unreferenced(self, blocks: list[int]) -> int:
        """How many of `blocks` are free: what acquiring them takes from `num_free`."""

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each; what they held is forgotten or moves to the lower tier."""

    def acquire(self, blocks: list[int]) -> None:
        """One more reference for each; a free one must be cached."""

    def release(self, blocks: list[int]) -> None:
        """One reference less for each, from the last to the first."""

    def match(self, tokens: list[int], num_full_blocks: int, salt: str = "") -> tuple[list[int], list[int]]:
        """The longest known run from the start of `tokens`: blocks here, then blocks of the lower tier.

        At most `num_full_blocks` together. No reference is taken.
        """

    def insert(self, table: list[int], first: int, last: int, tokens: list[int], salt: str = "") -> None:
        """Makes the full blocks `table[first:last]` of a sequence of `tokens` known."""

    def forget(self, blocks: list[int]) -> None:
        """The cache forgets what these hold; the blocks themselves stay as they are."""

    def reset_cache(self) -> None: ...
    def set_lower_tier(self, lower: BlockPool | None) -> None:
        """Blocks evicted from this pool move to `lower` from now on, while it has room."""

    def take_demotions(self) -> list[tuple[int, int]]:
        """(block, lower block) of the evictions to copy; each lower block holds a reference till released."""

    def transfer(self, blocks: list[int], to: BlockPool) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Blocks of `to` for what `blocks`, all referenced, hold; and the copies to make, (block, new block).

        Each gets one reference. Content that is known in `to` already is shared and not copied. None, and
        nothing has changed, if `to` has too few free blocks.
        """

    def check(self) -> None:
        """Raises RuntimeError if an invariant of the lists or the map is broken. O(num_blocks)."""
