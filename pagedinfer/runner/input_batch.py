"""The running requests by slot, on the device, and the input tensors of a step made from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer._core import pack_decodes
from pagedinfer.engine.batch import AdmittedRequest, Batch
from pagedinfer.runner.upload import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors on the device. T: its tokens; N: its requests; S: those that draw a token."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], each token's position in its request
    slot_mapping: Tensor  # int64 [T], where in the cache its K and V go; -1: nowhere
    block_table: Tensor  # int32 [N, at least the most blocks that one of them uses]
    query_start_loc: Tensor  # int32 [N + 1], where each request's tokens begin
    seq_lens: Tensor  # int32 [N], with this step's tokens; 0: an unused row
    max_query_len: int
    sample_rows: Tensor | None  # int64 [S], the token whose logits are drawn from; None: all T of them
    sample_slots: Tensor  # int32 [S]; -1: an unused row
    output_positions: Tensor  # int64 [max_num_seqs], by slot: the index of the token to be drawn, from 0


class InputBatch:
    """What the runner knows of each running request, indexed by slot.

    Block tables, prompt lengths and the last tokens live on the device, and a step uploads only what is
    new. A token that is drawn goes from the sampler to the next step's input on the device, unseen by the
    host. Tokens that were known when a request was admitted are kept on the host.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._num_columns = -(-max_model_len // block_size)
        self._device = device

        self._tokens: list[npt.NDArray[np.int32]] = [np.empty(0, np.int32)] * max_num_seqs
        self._num_known_tokens = np.zeros(max_num_seqs, np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        # What the device has not been told yet: places in the flattened block table, prompts by slot.
        self._new_blocks: dict[int, int] = {}
        self._new_prompts: dict[int, int] = {}

        def by_slot(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(max_num_seqs, *shape, dtype=dtype, device=device)

        self._block_table = by_slot(self._num_columns, dtype=torch.int32)
        self._num_prompt_tokens = by_slot()
        self._last_tokens = by_slot()
        self._output_positions = by_slot()
        self._decode_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def admit(self, request: AdmittedRequest) -> None:
        """Gives a slot to a request, in place of what held it before."""
        slot = request.slot
        self._tokens[slot] = np.array(request.token_ids, np.int32)
        self._num_known_tokens[slot] = len(request.token_ids)
        self._new_prompts[slot] = request.num_prompt_tokens
        self._num_blocks[slot] = 0
        self.append_blocks(slot, request.block_ids)

    def release(self, slot: int) -> None:
        """Forgets the request of a slot."""
        self._tokens[slot] = np.empty(0, np.int32)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Lengthens a slot's block table."""
        begin = int(self._num_blocks[slot])
        place = slot * self._num_columns + begin
        self._new_blocks.update(zip(range(place, place + len(block_ids)), block_ids, strict=True))
        self._num_blocks[slot] = begin + len(block_ids)

    # ---- any step ----

    def prepare(self, batch: Batch) -> StepInputs:
        """The tensors of a batch with at least one request; its admissions and blocks have been noted."""
        requests = batch.requests
        slots = np.array([request.slot for request in requests], np.int32)
        starts = np.array([request.start for request in requests], np.int32)
        counts = np.array([request.num_tokens for request in requests], np.int32)
        sampled = np.array([request.sample for request in requests], np.bool_)
        ends = starts + counts
        query_start_loc = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        last_rows = query_start_loc[1:] - 1

        positions, token_slots = starts, slots
        num_tokens = int(query_start_loc[-1])
        if num_tokens > len(requests):
            positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(ends - 1 - last_rows, counts)
            token_slots = np.repeat(slots, counts)

        input_ids = np.zeros(num_tokens, np.int32)
        known = starts < self._num_known_tokens[slots]
        for i in np.flatnonzero(known):
            begin = query_start_loc[i]
            input_ids[begin : begin + counts[i]] = self._tokens[slots[i]][starts[i] : ends[i]]
        drawn = ~known  # decodes: their one token is the last that was drawn

        new_blocks, self._new_blocks = self._new_blocks, {}
        new_prompts, self._new_prompts = self._new_prompts, {}
        sent = upload(
            [
                input_ids,
                positions,
                token_slots,
                query_start_loc,
                ends,
                slots,
                slots[sampled],
                ends[sampled],
                last_rows[sampled],
                slots[drawn],
                last_rows[drawn],
                *(_int32(part) for part in (new_blocks, new_blocks.values())),
                *(_int32(part) for part in (new_prompts, new_prompts.values())),
            ],
            self._device,
        )
        self._apply(*sent[11:])
        wide_positions = sent[1].long()
        wide_ids = sent[0].long()
        if drawn.any():
            wide_ids.index_copy_(0, sent[10].long(), self._last_tokens.index_select(0, sent[9]))
        sample_slots = sent[6]
        if sample_slots.shape[0]:
            prompts = self._num_prompt_tokens.index_select(0, sample_slots)
            self._output_positions.index_copy_(0, sample_slots.long(), sent[7] - prompts)
        num_columns = -(-int(ends.max()) // self._block_size)
        return StepInputs(
            input_ids=wide_ids,
            positions=wide_positions,
            slot_mapping=self._slot_mapping(self._places(sent[2], wide_positions), wide_positions),
            block_table=self._block_table[:, :num_columns].index_select(0, sent[5]),
            query_start_loc=sent[3],
            seq_lens=sent[4],
            max_query_len=int(counts.max()),
            sample_rows=None if sample_slots.shape[0] == num_tokens else sent[8].long(),
            sample_slots=sample_slots,
            output_positions=self._output_positions,
        )

    def _apply(self, places: Tensor, blocks: Tensor, slots: Tensor, num_prompt_tokens: Tensor) -> None:
        """Brings the device's state up to date."""
        if places.shape[0]:
            self._block_table.view(-1).index_copy_(0, places.long(), blocks)
        if slots.shape[0]:
            self._num_prompt_tokens.index_copy_(0, slots.long(), num_prompt_tokens.long())

    def _places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """int64 [n]: where in the flattened block table the block of each position is."""
        return slots * self._num_columns + positions // self._block_size

    def _slot_mapping(self, places: Tensor, positions: Tensor) -> Tensor:
        blocks = self._block_table.view(-1).index_select(0, places)
        return blocks * self._block_size + positions % self._block_size

    # ---- a step of decodes alone ----

    def pack_decodes(self, batch: Batch) -> npt.NDArray[np.int32] | None:
        """int32 [3, N]: slots, sequence lengths with this step's token, and new blocks, -1 for none.

        That is all there is to say of a step in which every request computes the token that it drew last.
        None, and nothing has changed: the batch is not such a step.
        """
        requests = batch.requests
        if not requests or batch.admitted or self._new_blocks or self._new_prompts:
            return None
        packed = np.empty((3, len(requests)), np.int32)
        if not pack_decodes(requests, packed):
            return None
        slots, starts, blocks = packed
        if (starts < self._num_known_tokens[slots]).any():
            return None  # the last token of a prompt
        growing = np.flatnonzero(blocks >= 0)
        if growing.size:
            grown_slots = slots[growing]
            if (self._num_blocks[grown_slots] != starts[growing] // self._block_size).any():
                return None  # a block before it was needed
            self._num_blocks[grown_slots] += 1
        starts += 1  # now lengths
        return packed

    def prepare_decodes(self, packed: Tensor) -> StepInputs:
        """The tensors of a step of decodes, from what `pack_decodes` says of it, on the device.

        Nothing here looks at a value, so a CUDA graph can hold it. A row of slot -1, length 0 and block -1
        is padding.

        Args:
            packed: int32 [3, N].
        """
        slots, lengths, _ = packed
        inputs = ops.decode_inputs(
            packed,
            last_tokens=self._last_tokens,
            num_prompt_tokens=self._num_prompt_tokens,
            block_table=self._block_table,
            output_positions=self._output_positions,
            block_size=self._block_size,
        )
        return StepInputs(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            query_start_loc=self._decode_starts[: slots.shape[0] + 1],
            seq_lens=lengths,
            max_query_len=1,
            sample_rows=None,
            sample_slots=slots,
            output_positions=self._output_positions,
        )

    # ---- what a step drew ----

    def set_last_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keeps what a step drew (int64 [S], for slots int32 [S], -1 for padding) as the input of the next.

        A row that could not be sampled has -1: its request ends, but may be in the next step already, where
        any token will do.
        """
        ops.keep_tokens(slots, token_ids, self._last_tokens)


def _int32(numbers: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.fromiter(numbers, np.int32)
