"""The running requests by slot, on the device, and the input tensors of a step made from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer._core import pack_decodes
from pagedinfer.engine.batch import AdmittedRequest, Batch
from pagedinfer.runner.upload import upload

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepShape:
    """How large a step's tensors are, padding included."""

    num_tokens: int
    num_rows: int  # requests
    max_query_len: int  # the most tokens of one request

    @property
    def packed_length(self) -> int:
        """Elements of `PackedStep.packed`."""
        return 3 * self.num_tokens + 3 * self.num_rows + 1

    @property
    def parts(self) -> list[slice]:
        """Where in `PackedStep.packed` is what: six arrays, one after the other.

        Of the tokens their ids, -1 for the one that its request drew last, positions, and slots, -1 for
        padding; of the requests where their tokens begin (and the last ones end), their slots, their lengths.
        """
        tokens, rows = self.num_tokens, self.num_rows
        ends = np.cumsum([0, tokens, tokens, tokens, rows + 1, rows, rows]).tolist()
        return [slice(begin, end) for begin, end in pairwise(ends)]


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What the model is given of a step, on the device. T: its tokens; N: its requests; both with padding."""

    input_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T], each token's position in its request
    slot_mapping: Tensor  # int64 [T], where in the cache its K and V go; -1: nowhere
    block_table: Tensor  # int32 [N, at least the most blocks that one of them uses]
    query_start_loc: Tensor  # int32 [N + 1], where each request's tokens begin
    seq_lens: Tensor  # int32 [N], with this step's tokens; 0: an unused row
    max_query_len: int


@dataclass(frozen=True, slots=True)
class DrawInputs:
    """Which rows of a step draw a token, on the device. S: those."""

    sample_rows: Tensor | None  # int64 [S], the token whose logits are drawn from; None: all T of them
    sample_slots: Tensor  # int32 [S]; -1: an unused row
    output_positions: Tensor  # int64 [max_num_seqs], by slot: the index of the token to be drawn, from 0


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step whose tensors are still to be made, by `InputBatch.unpack`."""

    packed: Tensor  # int32 [shape.packed_length], on the device
    shape: StepShape
    draw: DrawInputs
    num_columns: int
    """Of the block table, that the requests use."""


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

        self._tokens: list[Int32s] = [np.empty(0, np.int32)] * max_num_seqs
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

    def send(self, batch: Batch, shape: StepShape | None = None) -> PackedStep:
        """Tells the device of a batch with at least one request; its admissions and blocks have been noted.

        Args:
            batch: any step.
            shape: to be padded to; None: no padding.
        """
        requests = batch.requests
        slots = np.array([request.slot for request in requests], np.int32)
        starts = np.array([request.start for request in requests], np.int32)
        counts = np.array([request.num_tokens for request in requests], np.int32)
        sampled = np.array([request.sample for request in requests], np.bool_)
        ends = starts + counts
        last_rows = np.cumsum(counts, dtype=np.int32) - 1
        shape = shape or StepShape(int(last_rows[-1]) + 1, len(requests), int(counts.max()))

        new_blocks, self._new_blocks = self._new_blocks, {}
        new_prompts, self._new_prompts = self._new_prompts, {}
        packed, sample_slots, sample_ends, sample_rows, *news = upload(
            [
                self._pack(slots, starts, counts, last_rows, shape),
                slots[sampled],
                ends[sampled],
                last_rows[sampled],
                *(_int32(part) for part in (new_blocks, new_blocks.values())),
                *(_int32(part) for part in (new_prompts, new_prompts.values())),
            ],
            self._device,
        )
        self._apply(*news)
        if sample_slots.shape[0]:
            prompts = self._num_prompt_tokens.index_select(0, sample_slots)
            self._output_positions.index_copy_(0, sample_slots.long(), sample_ends - prompts)
        draw = DrawInputs(
            sample_rows=None if sample_slots.shape[0] == shape.num_tokens else sample_rows.long(),
            sample_slots=sample_slots,
            output_positions=self._output_positions,
        )
        return PackedStep(packed, shape, draw, -(-int(ends.max()) // self._block_size))

    def _pack(
        self, slots: Int32s, starts: Int32s, counts: Int32s, last_rows: Int32s, shape: StepShape
    ) -> Int32s:
        """`PackedStep.packed` of requests, by their slots, first tokens, numbers of tokens and last rows."""
        num_requests, num_tokens = len(slots), int(last_rows[-1]) + 1
        packed = np.zeros(shape.packed_length, np.int32)
        input_ids, positions, token_slots, query_start_loc, row_slots, lengths = (
            packed[part] for part in shape.parts
        )
        input_ids[:num_tokens] = -1
        token_slots[num_tokens:] = -1
        known = starts < self._num_known_tokens[slots]  # the others are decodes
        first_rows = last_rows - counts + 1
        for i in np.flatnonzero(known):
            begin = first_rows[i]
            input_ids[begin : begin + counts[i]] = self._tokens[slots[i]][starts[i] : starts[i] + counts[i]]
        if num_tokens == num_requests:
            positions[:num_tokens], token_slots[:num_tokens] = starts, slots
        else:
            positions[:num_tokens] = np.arange(num_tokens, dtype=np.int32)
            positions[:num_tokens] += np.repeat(starts - first_rows, counts)
            token_slots[:num_tokens] = np.repeat(slots, counts)
        query_start_loc[1 : num_requests + 1] = last_rows + 1
        query_start_loc[num_requests + 1 :] = num_tokens
        row_slots[:num_requests], lengths[:num_requests] = slots, starts + counts
        return packed

    def unpack(self, packed: Tensor, shape: StepShape, num_columns: int | None = None) -> ModelInputs:
        """What the model is given of a step that was sent.

        Nothing here looks at a value, so a CUDA graph can hold it.

        Args:
            packed: of `PackedStep`; zeros with -1 for the tokens' slots are a step of nothing but padding.
            shape: its.
            num_columns: of the block table, that the requests use; None: all.
        """
        input_ids, positions, token_slots, query_start_loc, row_slots, lengths = (
            packed[part] for part in shape.parts
        )
        places = token_slots.clamp_min(0).long()
        drawn = self._last_tokens.index_select(0, places)
        positions = positions.long()
        blocks = self._block_table.view(-1).index_select(
            0, places * self._num_columns + positions // self._block_size
        )
        slot_mapping = blocks * self._block_size + positions % self._block_size
        return ModelInputs(
            input_ids=torch.where(input_ids < 0, drawn, input_ids),
            positions=positions,
            slot_mapping=torch.where(token_slots < 0, -1, slot_mapping),
            block_table=self._block_table[:, :num_columns].index_select(0, row_slots),
            query_start_loc=query_start_loc,
            seq_lens=lengths,
            max_query_len=shape.max_query_len,
        )

    def padding(self, shape: StepShape) -> Int32s:
        """int32 [shape.packed_length]: a step of nothing but padding, for `unpack`."""
        packed = np.zeros(shape.packed_length, np.int32)
        packed[shape.parts[2]] = -1
        return packed

    def _apply(self, places: Tensor, blocks: Tensor, slots: Tensor, num_prompt_tokens: Tensor) -> None:
        """Brings the device's state up to date."""
        if places.shape[0]:
            self._block_table.view(-1).index_copy_(0, places.long(), blocks)
        if slots.shape[0]:
            self._num_prompt_tokens.index_copy_(0, slots.long(), num_prompt_tokens.long())

    # ---- a step of decodes alone ----

    def pack_decodes(self, batch: Batch) -> Int32s | None:
        """int32 [3, N]: slots, sequence lengths with this step's token, and new blocks, -1 for none.

        That is all there is to say of a step in which every request computes the token that it drew last.
        None, and nothing has changed: the batch is not such a step.
        """
        requests = batch.requests
        if not requests or batch.admitted or self._new_blocks or self._new_prompts:
            return None
        packed = np.empty((3, len(requests)), np.int32)
        known, blocks = self._num_known_tokens, self._num_blocks
        if not pack_decodes(requests, packed, known, blocks, self._block_size):
            return None
        return packed

    def unpack_decodes(self, packed: Tensor) -> tuple[ModelInputs, DrawInputs]:
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
        for_model = ModelInputs(
            input_ids=inputs.input_ids,
            positions=inputs.positions,
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            query_start_loc=self._decode_starts[: slots.shape[0] + 1],
            seq_lens=lengths,
            max_query_len=1,
        )
        return for_model, DrawInputs(None, slots, self._output_positions)

    # ---- what a step drew ----

    def set_last_tokens(self, slots: Tensor, token_ids: Tensor) -> None:
        """Keeps what a step drew (int64 [S], for slots int32 [S], -1 for padding) as the input of the next.

        A row that could not be sampled has -1: its request ends, but may be in the next step already, where
        any token will do.
        """
        ops.keep_tokens(slots, token_ids, self._last_tokens)


def _int32(numbers: Iterable[int]) -> Int32s:
    return np.fromiter(numbers, np.int32)
