"""The sampling parameters of all slots, on the device, and the draw of a step's tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.runner.upload import upload
from pagedinfer.sampling_params import SamplingParams

_INT64 = 2**64


class Sampler:
    """One row of parameters for each slot. A step uploads them only if a request was admitted in it."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._temperature = np.zeros(max_num_seqs, np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._top_p = np.ones(max_num_seqs, np.float32)
        self._min_p = np.zeros(max_num_seqs, np.float32)
        self._seeds = np.zeros(max_num_seqs, np.int64)
        self._changed = True
        self._parameters: dict[str, Tensor] = {}

    def set(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The parameters of a request that takes `slot`, and its 64-bit seed."""
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = seed - _INT64 if seed >= _INT64 // 2 else seed  # the same 64 bits, signed
        self._changed = True

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Draws a token for each row.

        Args:
            logits: [num_rows, padded vocabulary].
            slots: int32 [num_rows], the slot of each row.
            positions: int64 [max_num_seqs], by slot: the index of the generated token, from 0.

        Returns:
            The tokens, int64 [num_rows], -1 where none could be drawn, and their log-probabilities
            before temperature and filters, float32 [num_rows].
        """
        if self._changed:
            self._upload()
        logprobs = torch.empty(logits.shape[0], dtype=torch.float32, device=self._device)
        token_ids = ops.sample_tokens(
            logits,
            slots,
            positions=positions,
            vocab_size=self._vocab_size,
            logprobs=logprobs,
            changes=None,
            **self._parameters,
        )
        return token_ids, logprobs

    def _upload(self) -> None:
        floats = upload([self._temperature, self._top_p, self._min_p], self._device)
        (top_k,) = upload([self._top_k], self._device)
        (seeds,) = upload([self._seeds], self._device)
        self._parameters = {
            "temperature": floats[0],
            "top_p": floats[1],
            "min_p": floats[2],
            "top_k": top_k,
            "seeds": seeds,
        }
        self._changed = False
