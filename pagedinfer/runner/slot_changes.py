"""Penalties, biases, masks and bans of the requests in the slots, on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.engine.batch import AdmittedRequest, ScheduledRequest
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.runner.grammar_masks import GrammarMasks
from pagedinfer.runner.token_history import TokenHistory
from pagedinfer.runner.upload import upload

_BIASES = 16  # columns of the table of biases, to begin with


@dataclass(slots=True)
class _Biases:
    """The biases of one slot, and what changes them from one step to another."""

    fixed: dict[int, float]  # logit_bias, and -inf for bad words of one token
    num_prompt_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]  # banned until so many tokens are there
    bad_words: list[tuple[int, ...]]  # those of several tokens: the last is banned after the others
    shown: dict[int, float] | None = None  # what the device has

    def current(self, num_output_tokens: int, output: list[int]) -> dict[int, float]:
        """The biases of the token with this index."""
        banned = [word[-1] for word in self.bad_words if _ends_with(output, word[:-1])]
        if num_output_tokens < self.min_tokens:
            banned += self.stop_token_ids
        return self.fixed | dict.fromkeys(banned, -math.inf) if banned else self.fixed

    @property
    def capacity(self) -> int:
        """The most biases at once."""
        last = {word[-1] for word in self.bad_words}
        return len(self.fixed.keys() | self.stop_token_ids | last)


class SlotChanges:
    """What `ops.sample_tokens` changes in the logits of each slot.

    Nothing is allocated before a request needs it, and a batch in which nobody does has no changes at all.
    A step uploads what is new: the parameters of a request that was admitted, and the biases of one whose
    bans are no longer the same (its min_tokens are reached, or a bad word has begun).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        history: TokenHistory,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._history = history
        self._masks = GrammarMasks(grammars, vocab_size, history)
        self._kinds = np.zeros(max_num_seqs, np.int32)
        self._penalties = np.zeros((3, max_num_seqs), np.float32)  # repetition, presence, frequency
        self._penalties[0] = 1.0
        self._biases: dict[int, _Biases] = {}
        self._changed = True
        self._tensors: ops.LogitsChanges | None = None
        self.version = 0
        """Another one when the tensors are others: a CUDA graph of a former one would use those of then."""

    @property
    def tensors(self) -> ops.LogitsChanges | None:
        """All slots', as they are now; None: there never was a change."""
        return self._tensors

    def set(self, request: AdmittedRequest) -> None:
        """What changes the logits of a request that takes a slot."""
        slot, params = request.slot, request.sampling_params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        kinds = 0
        if penalties != (1.0, 0.0, 0.0):
            kinds |= ops.LogitsChange.PENALTIES
        allowed = None if params.allowed_token_ids is None else self._bits(params.allowed_token_ids)
        self._masks.set(request, allowed)
        if allowed is not None or slot in self._masks:
            kinds |= ops.LogitsChange.MASK
        biases = _biases_of(request)
        self._biases.pop(slot, None)
        if biases is not None:
            kinds |= ops.LogitsChange.BIAS
            self._biases[slot] = biases
        if kinds == self._kinds[slot] == 0:
            return
        self._kinds[slot] = kinds
        self._penalties[:, slot] = penalties
        self._changed = True
        if not kinds:
            return
        tensors = self._allocate()
        if kinds & ops.LogitsChange.PENALTIES:
            self._set_counts(tensors, request)
        if allowed is not None and slot not in self._masks:
            self._write(self._allowed(), slot, allowed)
        if biases is not None:
            self._widen(tensors, biases.capacity)

    def release(self, slot: int) -> None:
        """The request of a slot has left."""
        self._biases.pop(slot, None)
        self._masks.release(slot)
        if self._kinds[slot]:
            self._kinds[slot] = 0
            self._changed = True

    @property
    def in_use(self) -> bool:
        """Whether any slot has changes."""
        return self._tensors is not None and bool(self._kinds.any())

    def changes(self, request: ScheduledRequest) -> bool:
        """Whether the logits of a request are changed."""
        return bool(self._kinds[request.slot])

    @property
    def slots_that_wait(self) -> Set[int]:
        """Those whose changes the CPU takes long to know, best done while the model runs."""
        return self._masks.slots

    def prepare(self, sampled: Sequence[ScheduledRequest]) -> ops.LogitsChanges | None:
        """The changes of a step that draws for these requests; None if there are none."""
        tensors = self._tensors
        if tensors is None or not self.in_use or not any(map(self.changes, sampled)):
            return None
        with torch.inference_mode():  # a step without changes does without: see ModelRunner.execute
            return self._bring_up_to_date(tensors, sampled)

    def _bring_up_to_date(
        self, tensors: ops.LogitsChanges, sampled: Sequence[ScheduledRequest]
    ) -> ops.LogitsChanges | None:
        for request in sampled:
            biases = self._biases.get(request.slot)
            if biases is not None:
                self._update_biases(tensors, request, biases)
        if not any(map(self.changes, sampled)):
            return None
        self._update_masks([request.slot for request in sampled if request.slot in self._masks])
        tensors = self._allocate()
        if self._changed:
            (kinds,) = upload([self._kinds], self._device)
            (penalties,) = upload([self._penalties], self._device)
            tensors.kinds.copy_(kinds)
            tensors.repetition_penalty.copy_(penalties[0])
            tensors.presence_penalty.copy_(penalties[1])
            tensors.frequency_penalty.copy_(penalties[2])
            self._changed = False
        return tensors

    def _update_biases(self, tensors: ops.LogitsChanges, request: ScheduledRequest, biases: _Biases) -> None:
        num_output_tokens = request.start + request.num_tokens - biases.num_prompt_tokens
        output = self._history.output(request.slot) if biases.bad_words else []
        current = biases.current(num_output_tokens, output)
        if current == biases.shown:
            return
        biases.shown = current
        if not current and not biases.bad_words:  # it had to reach min_tokens, and has
            del self._biases[request.slot]
            self._kinds[request.slot] &= ~ops.LogitsChange.BIAS
            self._changed = True
            return
        width = tensors.bias_ids.shape[1]
        ids, values = np.full(width, -1, np.int32), np.zeros(width, np.float32)
        ids[: len(current)] = list(current)
        values[: len(current)] = list(current.values())
        self._write(tensors.bias_ids, request.slot, ids)
        self._write(tensors.bias, request.slot, values)

    def _write(self, table: Tensor, slot: int, row: npt.NDArray[np.generic]) -> None:
        table[slot].copy_(upload([row], self._device)[0])

    def _allocate(self) -> ops.LogitsChanges:
        if self._tensors is None:
            slots, device = self._max_num_seqs, self._device
            self._tensors = ops.LogitsChanges(
                kinds=torch.zeros(slots, dtype=torch.int32, device=device),
                repetition_penalty=torch.ones(slots, device=device),
                presence_penalty=torch.zeros(slots, device=device),
                frequency_penalty=torch.zeros(slots, device=device),
                bias_ids=torch.full((slots, _BIASES), -1, dtype=torch.int32, device=device),
                bias=torch.zeros((slots, _BIASES), device=device),
            )
        return self._tensors

    def _replace(self, **tensors: Tensor) -> None:
        assert self._tensors is not None
        self._tensors = replace(self._tensors, **tensors)
        self.version += 1

    def _widen(self, tensors: ops.LogitsChanges, capacity: int) -> None:
        """Makes room for so many biases of one slot."""
        width = tensors.bias_ids.shape[1]
        if capacity <= width:
            return
        more = 2 ** math.ceil(math.log2(capacity)) - width
        padding = (0, more)
        self._replace(
            bias_ids=torch.nn.functional.pad(tensors.bias_ids, padding, value=-1),
            bias=torch.nn.functional.pad(tensors.bias, padding),
        )

    def _set_counts(self, tensors: ops.LogitsChanges, request: AdmittedRequest) -> None:
        counts = tensors.token_counts
        if counts is None:
            shape = (self._max_num_seqs, self._vocab_size)
            counts = torch.zeros(shape, dtype=torch.int16, device=self._device)
            self._replace(token_counts=counts)
        num_prompt_tokens = request.num_prompt_tokens
        prompt, generated = upload(
            [
                np.array(request.token_ids[:num_prompt_tokens], np.int64),
                np.array(request.token_ids[num_prompt_tokens:], np.int64),
            ],
            self._device,
        )
        ops.set_token_counts(counts, request.slot, prompt, generated)

    def _update_masks(self, slots: list[int]) -> None:
        """What the grammars of these slots allow for the token that is about to be drawn."""
        if not slots:
            return
        (uploaded,) = upload([self._masks.next(slots)], self._device)
        (where,) = upload([np.array(slots, np.int64)], self._device)
        self._allowed().index_copy_(0, where, uploaded)

    def _allowed(self) -> Tensor:
        """The masks of all slots, int32 [slots, ceil(vocabulary / 32)]."""
        allowed = self._allocate().allowed
        if allowed is None:
            shape = (self._max_num_seqs, -(-self._vocab_size // 32))
            allowed = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._replace(allowed=allowed)
        return allowed

    def _bits(self, token_ids: Sequence[int]) -> npt.NDArray[np.int32]:
        bits = np.zeros(32 * -(-self._vocab_size // 32), np.bool_)
        bits[list(token_ids)] = True
        return np.packbits(bits, bitorder="little").view("<i4")


def _ends_with(tokens: list[int], end: tuple[int, ...]) -> bool:
    return tuple(tokens[len(tokens) - len(end) :]) == end if len(tokens) >= len(end) else False


def _biases_of(request: AdmittedRequest) -> _Biases | None:
    params = request.sampling_params
    bans = {word[0]: -math.inf for word in request.bad_word_ids if len(word) == 1}
    fixed = dict(params.logit_bias or {}) | bans
    bad_words = [word for word in request.bad_word_ids if len(word) > 1]
    num_output_tokens = len(request.token_ids) - request.num_prompt_tokens
    min_tokens = params.min_tokens if request.stop_token_ids else 0
    if not fixed and not bad_words and num_output_tokens >= min_tokens:
        return None
    return _Biases(fixed, request.num_prompt_tokens, min_tokens, request.stop_token_ids, bad_words)
