"""The sampling parameters of all slots, on the device, and the draw of a step's tokens."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import AdmittedRequest, ScheduledRequest
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.runner.processed_logits import changed_logits, filtered_logits
from pagedinfer.runner.slot_changes import SlotChanges
from pagedinfer.runner.step_result import DrawnTokens
from pagedinfer.runner.token_history import TokenHistory
from pagedinfer.runner.upload import upload
from pagedinfer.sampling_params import SamplingParams

_INT64 = 2**64
_BYTES = 25  # of the parameters of a slot


class Sampler:
    """One row of parameters for each slot. A step uploads them only if a request was admitted in it.

    Args:
        max_num_seqs: number of slots.
        vocab_size: of the model.
        num_known_tokens: token ids from here on are never drawn: the tokenizer does not know them.
        processed_logprobs: rate tokens by the distribution that they are drawn from, not by the model's,
            for requests that ask for log-probabilities.
        device: where.
        grammars: for requests with structured outputs; None: there are none.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        num_known_tokens: int,
        device: torch.device,
        processed_logprobs: bool = False,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._num_known_tokens = num_known_tokens
        self._device = device
        self._host = np.zeros(_BYTES * max_num_seqs, np.uint8)

        def of_slots(first_byte: int, dtype: type) -> npt.NDArray[np.generic]:
            size = np.dtype(dtype).itemsize
            begin = first_byte * max_num_seqs
            return self._host[begin : begin + size * max_num_seqs].view(dtype)

        self._seeds = of_slots(0, np.int64)
        self._temperature = of_slots(8, np.float32)
        self._top_p = of_slots(12, np.float32)
        self._min_p = of_slots(16, np.float32)
        self._top_k = of_slots(20, np.int32)
        self._wants_logprob = of_slots(24, np.bool_)
        self._top_p.fill(1.0)
        self._changed = True
        self._packed = torch.zeros(_BYTES * max_num_seqs, dtype=torch.uint8, device=device)
        seeds, temperature, top_p, min_p, top_k, wants_logprob = torch.split(
            self._packed, [n * max_num_seqs for n in (8, 4, 4, 4, 4, 1)]
        )
        self._parameters = {
            "seeds": seeds.view(torch.int64),
            "temperature": temperature.view(torch.float32),
            "top_p": top_p.view(torch.float32),
            "min_p": min_p.view(torch.float32),
            "top_k": top_k.view(torch.int32),
            "wants_logprob": wants_logprob.view(torch.bool),
        }
        self._history = TokenHistory()
        self._changes = SlotChanges(
            max_num_seqs=max_num_seqs,
            vocab_size=vocab_size,
            device=device,
            history=self._history,
            grammars=grammars,
        )
        self._processed_logprobs = processed_logprobs
        self._rated: set[int] = set()  # slots whose log-probabilities are those of what is drawn from
        self._processed: dict[int, SamplingParams] = {}  # of slots with logits processors

    def set(self, request: AdmittedRequest) -> None:
        """The parameters of a request that takes a slot."""
        slot, params, seed = request.slot, request.sampling_params, request.seed
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._wants_logprob[slot] = request.num_logprobs is not None
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = seed - _INT64 if seed >= _INT64 // 2 else seed  # the same 64 bits, signed
        self._changed = True
        self._changes.set(request)
        looks_back = bool(params.logits_processors) or params.structured_outputs is not None
        if looks_back or any(len(word) > 1 for word in request.bad_word_ids):
            self._history.begin(request)
        else:
            self._history.forget(slot)
        self._rated.discard(slot)
        if self._processed_logprobs and params.logprobs is not None:
            self._rated.add(slot)
        self._processed.pop(slot, None)
        if params.logits_processors:
            self._processed[slot] = params

    def release(self, slot: int) -> None:
        """The request of a slot has left."""
        self._changes.release(slot)
        self._history.forget(slot)
        self._processed.pop(slot, None)
        self._rated.discard(slot)

    def upload(self) -> None:
        """Tells the device what was set; call before a step that draws."""
        if self._changed:
            (packed,) = upload([self._host], self._device)
            self._packed.copy_(packed)
            self._changed = False

    def can_be_captured(self, requests: Sequence[ScheduledRequest]) -> bool:
        """Whether a CUDA graph may draw for these requests: `prepare` before it, `draw` in it."""
        special = self._processed.keys() | self._rated | self._changes.slots_that_wait
        return not special or special.isdisjoint([request.slot for request in requests])

    def prepare(self, requests: Sequence[ScheduledRequest]) -> int | None:
        """Tells the device what is new in the changes of those requests' logits.

        Returns:
            A number for the tensors that `draw` is to use; None if none of these requests has changes.
        """
        changes = self._changes.prepare(requests)
        return None if changes is None else self._changes.version

    def draw(
        self, logits: Tensor, slots: Tensor, positions: Tensor, out: DrawnTokens, *, changing: bool
    ) -> None:
        """The device's part of `sample` for requests that can be captured; waits for nothing.

        Args:
            logits, slots, positions, out: see `sample`.
            changing: some of the requests have changes; without, all are taken to have none.
        """
        ops.sample_tokens(
            logits,
            slots,
            positions=positions,
            vocab_size=self._num_known_tokens,
            token_ids=out.token_ids,
            logprobs=out.logprobs,
            changes=self._changes.tensors if changing else None,
            **self._parameters,
        )

    def note(self, requests: Sequence[ScheduledRequest], token_ids: Tensor) -> None:
        """What `draw` drew for these requests, the first rows."""
        self._history.note(requests, token_ids)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        out: DrawnTokens,
        requests: Sequence[ScheduledRequest],
    ) -> Tensor:
        """Draws a token for each row.

        Args:
            logits: [num_rows, padded vocabulary].
            slots: int32 [num_rows], the slot of each row; -1 is padding.
            positions: int64 [max_num_seqs], by slot: the index of the generated token, from 0.
            out: of num_rows rows. A token is -1 where none could be drawn; its log-probability is that
                before temperature and filters, 0 for a request that wants none.
            requests: those that draw, in the order of the rows.

        Returns:
            The logits by which the tokens are to be rated, [num_rows, padded vocabulary].
        """
        processed = [
            (row, self._processed[r.slot]) for row, r in enumerate(requests) if r.slot in self._processed
        ]
        drawn_from = self._process(logits, requests, processed) if processed else logits
        changing = self.prepare(requests) is not None
        rated = [row for row, request in enumerate(requests) if request.slot in self._rated]
        if rated:
            (rows,) = upload([np.array(rated, np.int64)], self._device)
            rated_slots = slots[rows].long()
            changes = self._changes.tensors if changing else None
            changed = changed_logits(drawn_from[rows, : self._num_known_tokens], rated_slots, changes)
        self.draw(drawn_from, slots, positions, out, changing=changing)
        self.note(requests, out.token_ids)
        if processed:
            raw = ops.top_logprobs(logits, out.token_ids, 0, vocab_size=self._num_known_tokens)
            out.logprobs.copy_(raw.logprobs)
        if not rated:
            return logits
        token_ids = out.token_ids[rows]
        filters = {name: self._parameters[name] for name in ("temperature", "top_k", "top_p", "min_p")}
        changed = filtered_logits(changed, rated_slots, token_ids, **filters)
        out.logprobs[rows] = ops.top_logprobs(changed, token_ids, 0).logprobs
        by_row = logits.float().clone()
        by_row[rows, : self._num_known_tokens] = changed
        return by_row

    def _process(
        self,
        logits: Tensor,
        requests: Sequence[ScheduledRequest],
        processed: list[tuple[int, SamplingParams]],
    ) -> Tensor:
        """A copy of the logits in float32 with the rows that the requests' own processors give."""
        changed = logits.float().clone()
        for row, params in processed:
            slot = requests[row].slot
            output = self._history.output(slot).copy()
            values = changed[row, : self._num_known_tokens].clone()
            for processor in params.logits_processors or ():
                if _num_arguments(processor) >= 3:
                    values = processor(self._history.prompt(slot).copy(), output, values)
                else:
                    values = processor(output, values)
            if not isinstance(values, Tensor) or values.shape != (self._num_known_tokens,):
                got = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise ValueError(
                    f"a logits processor must return the row of logits, a tensor of shape "
                    f"[{self._num_known_tokens}], got {got}"
                )
            changed[row, : self._num_known_tokens] = values
        return changed


def _num_arguments(processor: object) -> int:
    assert callable(processor)
    try:
        return len(inspect.signature(processor).parameters)
    except (TypeError, ValueError):  # of a builtin
        return 2
