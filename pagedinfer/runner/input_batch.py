"""The running requests by slot, and the input tensors of a step made from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer.engine.batch import AdmittedRequest, Batch
from pagedinfer.runner.upload import upload


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's tensors on the device. T: its tokens; N: its requests; S: those that draw a token."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], each token's position in its request
    slot_mapping: Tensor  # int64 [T], where in the cache its K and V go
    block_table: Tensor  # int32 [N, most blocks that one of them uses]
    query_start_loc: Tensor  # int32 [N + 1], where each request's tokens begin
    seq_lens: Tensor  # int32 [N], with this step's tokens
    max_query_len: int
    sample_rows: Tensor | None  # int64 [S], the token whose logits are drawn from; None: all T of them
    sample_slots: Tensor  # int32 [S]
    output_positions: Tensor  # int64 [max_num_seqs], by slot: the index of the token to be drawn, from 0


class InputBatch:
    """What the runner knows of each running request, indexed by slot.

    Tokens that were known when a request was admitted are kept on the host. One that is drawn later goes
    from the sampler to the next step's input on the device, in `last_tokens`, unseen by the host.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._device = device
        self._tokens: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)] * max_num_seqs
        self._num_known_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._output_positions = np.zeros(max_num_seqs, np.int64)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def admit(self, request: AdmittedRequest) -> None:
        """Gives a slot to a request, in place of what held it before."""
        slot = request.slot
        self._tokens[slot] = np.array(request.token_ids, np.int64)
        self._num_known_tokens[slot] = len(request.token_ids)
        self._num_prompt_tokens[slot] = request.num_prompt_tokens
        self._num_blocks[slot] = 0
        self.append_blocks(slot, request.block_ids)

    def release(self, slot: int) -> None:
        """Forgets the request of a slot."""
        self._tokens[slot] = np.empty(0, np.int64)

    def append_blocks(self, slot: int, block_ids: list[int]) -> None:
        """Lengthens a slot's block table."""
        begin = int(self._num_blocks[slot])
        self._block_table[slot, begin : begin + len(block_ids)] = block_ids
        self._num_blocks[slot] = begin + len(block_ids)

    def prepare(self, batch: Batch) -> StepInputs:
        """The tensors of a batch with at least one request; its admissions have been made."""
        requests = batch.requests
        slots = np.array([request.slot for request in requests], np.int64)
        starts = np.array([request.start for request in requests], np.int64)
        counts = np.array([request.num_tokens for request in requests], np.int64)
        sampled = np.array([request.sample for request in requests], np.bool_)
        ends = starts + counts
        last_rows = np.cumsum(counts)
        query_start_loc = np.zeros(len(requests) + 1, np.int32)
        query_start_loc[1:] = last_rows
        last_rows -= 1

        positions, token_slots = starts, slots
        num_tokens = int(query_start_loc[-1])
        if num_tokens > len(requests):
            positions = np.arange(num_tokens) + np.repeat(ends - 1 - last_rows, counts)
            token_slots = np.repeat(slots, counts)
        block_ids = self._block_table[token_slots, positions // self._block_size]
        slot_mapping = block_ids * np.int64(self._block_size) + positions % self._block_size
        num_columns = -(-int(ends.max()) // self._block_size)

        input_ids = np.zeros(num_tokens, np.int64)
        known = starts < self._num_known_tokens[slots]
        for i in np.flatnonzero(known):
            begin = query_start_loc[i]
            input_ids[begin : begin + counts[i]] = self._tokens[slots[i]][starts[i] : ends[i]]
        drawn = ~known  # decodes: their one token is the last that was drawn

        sample_slots = slots[sampled]
        self._output_positions[sample_slots] = ends[sampled] - self._num_prompt_tokens[sample_slots]

        wide = upload(
            [
                input_ids,
                positions,
                slot_mapping,
                last_rows[sampled],
                last_rows[drawn],
                slots[drawn],
                self._output_positions,
            ],
            self._device,
        )
        narrow = upload(
            [
                query_start_loc,
                ends.astype(np.int32),
                sample_slots.astype(np.int32),
                self._block_table[slots, :num_columns],
            ],
            self._device,
        )
        if drawn.any():
            wide[0].index_copy_(0, wide[4], self._last_tokens.index_select(0, wide[5]))
        return StepInputs(
            input_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            block_table=narrow[3],
            query_start_loc=narrow[0],
            seq_lens=narrow[1],
            max_query_len=int(counts.max()),
            sample_rows=None if len(sample_slots) == num_tokens else wide[3],
            sample_slots=narrow[2],
            output_positions=wide[6],
        )

    def set_last_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keeps what a step drew (int64 [S], for slots int32 [S]) as the input of the next."""
        self._last_tokens.index_copy_(0, slots.long(), token_ids)
