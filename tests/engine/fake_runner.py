"""A runner without a model: it keeps what every KV slot was written for, and checks what would be read.

The "KV" of a token is a digest of all tokens up to it, so a slot that was written for another token,
position or prefix never passes for the right one. The next token is a function of the digest of the
whole context, so what a request generates depends on its tokens alone, and `expected_output` gives it
without any scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.scheduler_config import SchedulerConfig

VOCAB_SIZE = 50
_MASK = (1 << 61) - 1


def digest(prefix: int, token: int) -> int:
    """What the KV of `token` after `prefix` stands for here."""
    return (prefix * 0x1F3D5B79 + token + 1) * 0x9E3779B1 % _MASK


def next_token(context: int, seed: int) -> int:
    return (context ^ seed * 7919) % VOCAB_SIZE


def params(**fields: Any) -> Any:
    """Sampling parameters, as far as the scheduler looks at them."""
    defaults = {"max_tokens": 16, "min_tokens": 0, "ignore_eos": False, "stop_token_ids": [], "stop": None}
    return SimpleNamespace(**(defaults | fields))


def expected_output(token_ids: list[int], seed: int, num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens that any right schedule generates after `token_ids`."""
    state = 0
    for token in token_ids:
        state = digest(state, token)
    output = []
    for _ in range(num_tokens):
        output.append(next_token(state, seed))
        state = digest(state, output[-1])
    return output


@dataclass
class FakeSlot:
    request_id: str
    token_ids: list[int]
    seed: int
    block_ids: list[int]
    computed: int | None = None  # None: just admitted, may start anywhere
    digests: list[int] = field(default_factory=list)

    def digest_at(self, position: int) -> int:
        while len(self.digests) <= position:
            before = self.digests[-1] if self.digests else 0
            self.digests.append(digest(before, self.token_ids[len(self.digests)]))
        return self.digests[position]


class FakeHandle:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output


class FakeRunner:
    """Executes batches on digests. Raises AssertionError when a batch breaks its contract.

    A swap in takes `swap_in_steps` further steps, unless somebody is given its block before.
    """

    def __init__(self, config: SchedulerConfig, swap_in_steps: int = 0) -> None:
        self.config = config
        self.kv = [[-1] * config.block_size for _ in range(config.num_blocks)]
        self.cpu_kv = [[-1] * config.block_size for _ in range(config.num_cpu_blocks)]
        self.slots: list[FakeSlot | None] = [None] * config.max_num_seqs
        self.urgent_slots: list[FakeSlot | None] = [None]
        self.num_computed = 0  # tokens, over all steps
        self.swap_in_steps = swap_in_steps
        self.arriving: list[tuple[int, int, int]] = []  # (step that began it, CPU block, block)
        self.num_waits = 0  # steps that had to wait for a block
        self.forced_tokens: dict[str, list[int]] = {}  # request id -> tokens to draw instead

    def execute(self, batch: Batch) -> FakeHandle:
        assert batch.num_tokens <= self.config.max_num_batched_tokens
        for slot in batch.released_slots:
            self.slots[slot] = None
        for new in batch.admitted:
            assert self.slots[new.slot] is None, f"slot {new.slot} is taken"
            self.slots[new.slot] = FakeSlot(
                new.request_id, list(new.token_ids), new.seed, list(new.block_ids)
            )
        self._move(batch)
        self._write(batch)
        output = self._sample(batch)
        output.swaps_in_done = min((step - 1 for step, _, _ in self.arriving), default=batch.step)
        return FakeHandle(output)

    def execute_urgent(self, batch: Batch) -> FakeHandle:
        """On the same blocks, with slots of its own. Call it at any time before later batches execute."""
        slots, self.slots = self.slots, self.urgent_slots
        try:
            return self.execute(batch)
        finally:
            self.slots = slots

    def _move(self, batch: Batch) -> None:
        for moves in (batch.swaps_out, batch.swaps_in, batch.copies):
            destinations = [to for _, to in moves]
            assert len(set(destinations)) == len(destinations), "a block is written twice"
        moved = {block for block, _ in batch.swaps_out} | {to for _, to in batch.swaps_in}
        self._end_swaps_in(moved, {to for _, to in batch.swaps_out})
        swapped_out = [self.kv[source].copy() for source, _ in batch.swaps_out]
        for (_, to), content in zip(batch.swaps_out, swapped_out, strict=True):
            self.cpu_kv[to] = content
        self.arriving += [(batch.step, source, to) for source, to in batch.swaps_in]
        used = {block for new in batch.admitted for block in new.block_ids}
        used.update(block for work in batch.requests for block in work.new_block_ids)
        used.update(block for pair in batch.copies for block in pair)
        self.num_waits += self._end_swaps_in(used, set())
        over = {to for step, _, to in self.arriving if step + self.swap_in_steps <= batch.step}
        self._end_swaps_in(over, set())
        copied = [self.kv[source].copy() for source, _ in batch.copies]
        for (_, to), content in zip(batch.copies, copied, strict=True):
            self.kv[to] = content

    def _end_swaps_in(self, blocks: set[int], cpu_blocks: set[int]) -> bool:
        """Ends those under way that have to do with these blocks; whether there are any."""
        ending = [move for move in self.arriving if move[2] in blocks or move[1] in cpu_blocks]
        self.arriving = [move for move in self.arriving if move not in ending]
        for _, source, to in ending:
            self.kv[to] = self.cpu_kv[source].copy()
        return bool(ending)

    def _write(self, batch: Batch) -> None:
        """All writes come before all reads, as within a layer."""
        block_size = self.config.block_size
        written: set[tuple[int, int]] = set()
        for work in batch.requests:
            slot = self._slot(work.slot, work.request_id)
            slot.block_ids += work.new_block_ids
            end = work.start + work.num_tokens
            assert work.num_tokens >= 1
            assert slot.computed in (None, work.start), "a request skips or repeats tokens"
            assert end <= len(slot.token_ids), "a token is computed that nobody has drawn"
            assert end <= len(slot.block_ids) * block_size, "tokens without a block"
            assert work.sample == (end == len(slot.token_ids))
            for position in range(work.start, end):
                place = (slot.block_ids[position // block_size], position % block_size)
                assert place not in written, "two requests write the same place"
                written.add(place)
                self.kv[place[0]][place[1]] = slot.digest_at(position)
            slot.computed = end
        for work in batch.requests:
            slot = self._slot(work.slot, work.request_id)
            for position in range(work.start + work.num_tokens):
                found = self.kv[slot.block_ids[position // block_size]][position % block_size]
                assert found == slot.digest_at(position), (
                    f"step {batch.step}: {work.request_id} reads wrong KV at position {position}"
                )
        self.num_computed += batch.num_tokens

    def _sample(self, batch: Batch) -> StepOutput:
        tokens = []
        for work in batch.requests:
            if not work.sample:
                continue
            slot = self._slot(work.slot, work.request_id)
            token = next_token(slot.digest_at(len(slot.token_ids) - 1), slot.seed)
            if self.forced_tokens.get(work.request_id):
                token = self.forced_tokens[work.request_id].pop(0)
            slot.token_ids.append(token)
            tokens.append(token)
        logprobs = np.full(len(tokens), -1.0, np.float32)
        return StepOutput(np.array(tokens, np.int64), logprobs)

    def _slot(self, index: int, request_id: str) -> FakeSlot:
        slot = self.slots[index]
        assert slot is not None, f"slot {index} is empty"
        assert slot.request_id == request_id, f"slot {index} belongs to {slot.request_id}"
        return slot
