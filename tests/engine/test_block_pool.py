"""BlockPool: references, the free list's order, the prefix cache, the lower tier."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagedinfer._core import BlockPool

SIZE = 4


def tokens_of(*blocks: str) -> list[int]:
    """One block of tokens for each letter."""
    return [ord(letter) * 10 + i for letter in blocks for i in range(SIZE)]


def put(pool: BlockPool, sequence: str, salt: str = "") -> list[int]:
    """Allocates and caches a block for each letter of `sequence`."""
    table = pool.allocate(len(sequence))
    pool.insert(table, 0, len(table), tokens_of(*sequence), salt)
    return table


def match(pool: BlockPool, sequence: str, salt: str = "") -> list[int]:
    return pool.match(tokens_of(*sequence), len(sequence), salt)[0]


def test_allocate_takes_each_block_once_and_release_gives_it_back() -> None:
    pool = BlockPool(6, SIZE)
    first, second = pool.allocate(2), pool.allocate(4)
    assert sorted(first + second) == list(range(6))
    assert pool.num_free == 0
    with pytest.raises(ValueError, match="cannot allocate 1 blocks: 0 of 6 are free"):
        pool.allocate(1)
    pool.release(first)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="free already"):
        pool.release(first)
    with pytest.raises(ValueError, match=r"block 6 is not one of the pool's 6"):
        pool.ref_count(6)
    with pytest.raises(ValueError, match="holds nothing known"):
        pool.acquire(first)
    pool.check()


def test_a_shared_block_is_free_when_its_last_reference_is_gone() -> None:
    pool = BlockPool(3, SIZE)
    table = pool.allocate(2)
    pool.acquire(table)
    pool.release(table)
    assert pool.num_free == 1
    assert pool.num_unreferenced([*table, 2]) == 1
    pool.release(table)
    assert pool.num_free == 3


def test_a_released_block_is_found_until_it_is_handed_out() -> None:
    pool = BlockPool(3, SIZE)
    table = put(pool, "ab")
    pool.release(table)
    assert match(pool, "abc") == table
    pool.acquire(table)
    assert pool.num_free == 1
    pool.release(table)
    pool.allocate(3)
    assert match(pool, "abc") == []
    assert pool.num_cached == 0


def test_least_recently_used_and_ends_before_beginnings() -> None:
    pool = BlockPool(5, SIZE)
    old, new = put(pool, "ab"), put(pool, "cd")
    pool.release(old)
    pool.release(new)
    unknown = pool.allocate(1)  # the block that holds nothing goes first
    assert pool.num_cached == 4
    pool.release(unknown)
    pool.acquire(old)  # used again: now the youngest
    pool.release(old)
    order = pool.allocate(5)
    assert order == [*unknown, new[1], new[0], old[1], old[0]]


def test_a_block_matches_only_behind_the_same_prefix_and_under_the_same_salt() -> None:
    pool = BlockPool(8, SIZE)
    table = put(pool, "ab", salt="x")
    assert match(pool, "ab", salt="x") == table
    assert match(pool, "ab") == []
    assert match(pool, "ab", salt="y") == []
    assert match(pool, "b", salt="x") == []
    assert match(pool, "cb", salt="x") == []
    assert match(pool, "aab", salt="x") == table[:1]


@pytest.mark.parametrize("hash_bits", [0, 1, 3])
def test_colliding_hashes_never_serve_other_content(hash_bits: int) -> None:
    """CVE-2025-25183: a prompt made to collide with another was served its KV."""
    pool = BlockPool(64, SIZE, hash_bits=hash_bits)
    tables = {}
    for sequence in ["ab", "ac", "bb", "ca", "cab", "bca"]:
        tables[sequence] = put(pool, sequence)
        pool.check()
    for sequence in tables:
        found = match(pool, sequence)
        assert len(found) == len(sequence)
        for i, block in enumerate(found):
            same = [table[i] for other, table in tables.items() if other[: i + 1] == sequence[: i + 1]]
            assert block in same
    assert match(pool, "bc") == tables["bca"][:2]
    assert match(pool, "da") == []


def test_the_same_content_twice_is_one_content() -> None:
    """mini-sglang PR#142, vllm PR#7018: the same prompt three times in one step."""
    pool = BlockPool(12, SIZE)
    tables = [put(pool, "ab") for _ in range(3)]
    assert len({block for table in tables for block in table}) == 6
    longer = pool.allocate(1)
    pool.insert(tables[1] + longer, 2, 3, tokens_of("a", "b", "c"))
    assert match(pool, "abc")[2:] == longer  # whichever of the three the first two are found in
    for table in tables:
        pool.release(table)
    pool.allocate(9)  # everything but what is behind them in the free list
    pool.check()
    assert match(pool, "abc")[2:] in ([], longer)


def test_the_map_forgets_a_block_that_is_handed_out() -> None:
    """nano-vllm#163, vllm PR#4761: A, then B over A's blocks, then A again."""
    pool = BlockPool(2, SIZE)
    a = put(pool, "ab")
    pool.release(a)
    b = put(pool, "cd")
    assert sorted(b) == sorted(a)
    assert match(pool, "ab") == []
    assert match(pool, "cd") == b


def test_reset_forgets_everything_and_what_grows_on_it() -> None:
    pool = BlockPool(6, SIZE)
    table = put(pool, "ab")
    pool.reset_cache()
    assert match(pool, "ab") == []
    table += pool.allocate(1)
    pool.insert(table, 2, 3, tokens_of("a", "b", "c"))
    assert pool.num_cached == 0  # its prefix was computed before the reset
    fresh = put(pool, "ab")
    assert match(pool, "abc") == fresh
    pool.check()


def test_forgotten_blocks_are_handed_out_first() -> None:
    pool = BlockPool(3, SIZE)
    table = put(pool, "abc")
    pool.release(table)
    pool.forget(table[:1])
    assert match(pool, "abc") == []
    assert pool.allocate(1) == table[:1]
    pool.check()


def test_hashes_are_the_same_in_every_process() -> None:
    """vllm#29565: the hash must not depend on Python's hash() or pickle. These are the values, pinned."""
    pool = BlockPool(4, SIZE)
    table = put(pool, "ab")
    salted = put(pool, "a", salt="tenant 1, with more than eight bytes")
    assert [pool.hash(block) for block in table + salted] == [
        0x53C1928B2A94FCCB,
        0x2BE2634F2D00A149,
        0xF51C38D2F67635CF,
    ]
    odd = BlockPool(1, 1)
    odd.insert(odd.allocate(1), 0, 1, [123])
    assert odd.hash(0) == 0xE93D283D22415BE2


def test_tokens_that_are_no_tokens_are_refused() -> None:
    pool = BlockPool(2, 1)
    table = pool.allocate(2)
    for tokens in ([1 << 40], [1 << 70], [-(1 << 40)]):
        with pytest.raises(ValueError, match="32-bit"):
            pool.match(tokens, 1)
    with pytest.raises(TypeError):
        pool.match(["a"], 1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="not within a list of 1"):
        pool.insert(table, 0, 2, [1])
    with pytest.raises(ValueError, match="not within a list of 2"):
        pool.insert(table, 0, 3, [1, 2, 3])
    for arguments in [(-1, 1), (1, 0)]:
        with pytest.raises(ValueError, match="must"):
            BlockPool(*arguments)


# ---- two tiers -----------------------------------------------------------------------------------


def two_tiers(num_blocks: int, num_lower: int) -> tuple[BlockPool, BlockPool]:
    pool, lower = BlockPool(num_blocks, SIZE), BlockPool(num_lower, SIZE)
    pool.set_lower_tier(lower)
    return pool, lower


def test_an_evicted_block_moves_to_the_lower_tier_and_is_found_there() -> None:
    pool, lower = two_tiers(3, 4)
    table = put(pool, "abc")
    pool.release(table)
    pool.allocate(2)  # evicts c, then b
    demotions = pool.take_demotions()
    assert [block for block, _ in demotions] == [table[2], table[1]]
    assert pool.take_demotions() == []
    below = [lower_block for _, lower_block in demotions]
    assert [lower.ref_count(block) for block in below] == [1, 1]
    lower.release(below)
    assert pool.match(tokens_of(*"abc"), 3) == ([table[0]], [below[1], below[0]])
    assert pool.match(tokens_of(*"xbc"), 3) == ([], [])


def test_a_lower_block_on_its_way_is_not_taken_for_the_next_eviction() -> None:
    pool, lower = two_tiers(3, 2)
    pool.release(put(pool, "abc"))
    pool.allocate(3)
    demotions = pool.take_demotions()
    assert len(demotions) == 2  # the third found no room
    assert len({below for _, below in demotions}) == 2
    assert lower.num_free == 0


def test_what_is_below_already_is_not_copied_again() -> None:
    pool, lower = two_tiers(2, 4)
    pool.release(put(pool, "ab"))
    pool.release(pool.allocate(2))
    lower.release([below for _, below in pool.take_demotions()])
    pool.release(put(pool, "ab"))
    pool.allocate(2)
    assert pool.take_demotions() == []


def test_transfer_shares_what_is_known_and_copies_the_rest() -> None:
    pool, cpu = BlockPool(8, SIZE), BlockPool(4, SIZE)
    table = put(pool, "ab") + pool.allocate(1)
    out = pool.transfer(table, cpu)
    assert out is not None
    assert out[1] == list(zip(table, out[0], strict=True))
    again = pool.transfer(table, cpu)
    assert again is not None
    assert again[0][:2] == out[0][:2]
    assert again[1] == [(table[2], again[0][2])]
    assert cpu.num_free == 0
    assert pool.transfer(table, cpu) is None  # no room for the block that holds nothing known
    assert [cpu.ref_count(block) for block in out[0]] == [2, 2, 1]

    pool.release(table)
    back = cpu.transfer(out[0], pool)
    assert back is not None
    assert back[0][:2] == table[:2]  # still known here
    assert back[1] == [(out[0][2], back[0][2])]
    assert match(pool, "ab") == table[:2]
    with pytest.raises(ValueError, match="cannot be transferred"):
        pool.transfer([7], cpu)


def test_transfer_counts_known_but_free_blocks_as_taken() -> None:
    pool, cpu = BlockPool(3, SIZE), BlockPool(2, SIZE)
    table = put(pool, "ab")
    out = pool.transfer(table, cpu)
    assert out is not None
    cpu.release(out[0])
    more = table + pool.allocate(1)
    assert pool.transfer(more, cpu) is None
    assert cpu.num_free == 2
    cpu.check()


# ---- against a model -----------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Two tiers under random calls, beside a model of what every block holds."""

    @initialize(num=st.integers(1, 12), num_lower=st.integers(0, 6), bits=st.sampled_from([0, 2, 64]))
    def start(self, num: int, num_lower: int, bits: int) -> None:
        self.pool = BlockPool(num, 1, hash_bits=bits)
        self.lower = BlockPool(num_lower, 1, hash_bits=bits)
        self.pool.set_lower_tier(self.lower)
        self.tables: list[tuple[list[int], tuple[str, tuple[int, ...]]]] = []
        self.lower_tables: list[list[int]] = []
        self.content: dict[int, tuple[str, tuple[int, ...]]] = {}  # what was last written to each block
        self.lower_content: dict[int, tuple[str, tuple[int, ...]]] = {}
        self.known: set[tuple[str, tuple[int, ...]]] = set()  # everything ever cached

    def held(self) -> list[int]:
        return [block for table, _ in self.tables for block in table]

    def apply_demotions(self) -> None:
        for block, below in self.pool.take_demotions():
            self.lower_content[below] = self.content[block]
            self.lower.release([below])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=6), salt=st.sampled_from(["", "s"]))
    def admit(self, tokens: list[int], salt: str) -> None:
        here, below = self.pool.match(tokens, len(tokens), salt)
        for i, block in enumerate(here):
            assert self.content[block] == (salt, tuple(tokens[: i + 1]))
        for i, block in enumerate(below, start=len(here)):
            assert self.lower_content[block] == (salt, tuple(tokens[: i + 1]))
        needed = len(tokens) - len(here)
        if needed > self.pool.num_free - self.pool.num_unreferenced(here):
            return
        self.pool.acquire(here)
        new = self.pool.allocate(needed)
        assert not set(new) & {*self.held(), *here}, "handed out twice"
        self.apply_demotions()
        table = here + new
        for i, block in enumerate(new, start=len(here)):
            self.content[block] = (salt, tuple(tokens[: i + 1]))
        self.pool.insert(table, 0, len(table), tokens, salt)
        self.known |= {(salt, tuple(tokens[: i + 1])) for i in range(len(tokens))}
        self.tables.append((table, (salt, tuple(tokens))))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), upto=st.integers(0, 6))
    def fork(self, which: int, upto: int) -> None:
        table, (salt, tokens) = self.tables[which % len(self.tables)]
        if table[:upto]:
            self.pool.acquire(table[:upto])
            self.tables.append((table[:upto], (salt, tokens[:upto])))

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        table, _ = self.tables.pop(which % len(self.tables))
        self.pool.release(table)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def swap_out(self, which: int) -> None:
        index = which % len(self.tables)
        table, _ = self.tables[index]
        result = self.pool.transfer(table, self.lower)
        if result is None:
            return
        for block, below in result[1]:
            self.lower_content[below] = self.content[block]
        for block, below in zip(table, result[0], strict=True):
            assert self.lower_content[below] == self.content[block]
        self.lower_tables.append(result[0])
        self.pool.release(self.tables.pop(index)[0])

    @precondition(lambda self: self.lower_tables)
    @rule(which=st.integers(0, 100), back=st.booleans())
    def swap_in(self, which: int, back: bool) -> None:
        table = self.lower_tables[which % len(self.lower_tables)]
        before = {block: self.lower_content[block] for block in table}
        result = self.lower.transfer(table, self.pool) if back else None
        if back and result is None:
            return
        self.apply_demotions()
        if result is not None:
            for below, block in result[1]:
                self.content[block] = before[below]
            for below, block in zip(table, result[0], strict=True):
                assert self.content[block] == before[below]
            self.tables.append((result[0], before[table[-1]]))
        self.lower.release(table)
        self.lower_tables.remove(table)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.lower.reset_cache()

    @invariant()
    def consistent(self) -> None:
        self.pool.check()
        self.lower.check()
        held = self.held()
        for block in range(self.pool.num_blocks):
            assert self.pool.ref_count(block) == held.count(block)
        below = [block for table in self.lower_tables for block in table]
        for block in range(self.lower.num_blocks):
            assert self.lower.ref_count(block) == below.count(block)
        for table, (salt, tokens) in self.tables:
            for i, block in enumerate(table):
                assert self.content[block] == (salt, tokens[: i + 1]), "a table's block was overwritten"
        for salt, tokens in self.known:
            here, under = self.pool.match(list(tokens), len(tokens), salt)
            assert [self.content[b] for b in here] == [(salt, tokens[: i + 1]) for i in range(len(here))]
            for i, block in enumerate(under, start=len(here)):
                assert self.lower_content[block] == (salt, tokens[: i + 1])

    def teardown(self) -> None:
        for table, _ in getattr(self, "tables", []):
            self.pool.release(table)
        for lower_table in getattr(self, "lower_tables", []):
            self.lower.release(lower_table)
        if hasattr(self, "pool"):
            assert self.pool.num_free == self.pool.num_blocks
            assert self.lower.num_free == self.lower.num_blocks


PoolMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestPoolMachine = PoolMachine.TestCase
