"""The sampling parameters of all slots, on the device, and the draw of a step's tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.runner.step_result import DrawnTokens
from pagedinfer.runner.upload import upload
from pagedinfer.sampling_params import SamplingParams

_INT64 = 2**64
_BYTES = 24  # of the parameters of a slot


class Sampler:
    """One row of parameters for each slot. A step uploads them only if a request was admitted in it."""

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
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
        self._top_p.fill(1.0)
        self._changed = True
        self._packed = torch.zeros(_BYTES * max_num_seqs, dtype=torch.uint8, device=device)
        seeds, temperature, top_p, min_p, top_k = torch.split(
            self._packed, [n * max_num_seqs for n in (8, 4, 4, 4, 4)]
        )
        self._parameters = {
            "seeds": seeds.view(torch.int64),
            "temperature": temperature.view(torch.float32),
            "top_p": top_p.view(torch.float32),
            "min_p": min_p.view(torch.float32),
            "top_k": top_k.view(torch.int32),
        }

    def set(self, slot: int, params: SamplingParams, seed: int) -> None:
        """The parameters of a request that takes `slot`, and its 64-bit seed."""
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = seed - _INT64 if seed >= _INT64 // 2 else seed  # the same 64 bits, signed
        self._changed = True

    def upload(self) -> None:
        """Tells the device what was set; call before a step that draws."""
        if self._changed:
            (packed,) = upload([self._host], self._device)
            self._packed.copy_(packed)
            self._changed = False

    def sample(self, logits: Tensor, slots: Tensor, positions: Tensor, out: DrawnTokens) -> None:
        """Draws a token for each row.

        Args:
            logits: [num_rows, padded vocabulary].
            slots: int32 [num_rows], the slot of each row; -1 is padding.
            positions: int64 [max_num_seqs], by slot: the index of the generated token, from 0.
            out: of num_rows rows. A token is -1 where none could be drawn; its log-probability is that
                before temperature and filters.
        """
        ops.sample_tokens(
            logits,
            slots,
            positions=positions,
            vocab_size=self._vocab_size,
            token_ids=out.token_ids,
            logprobs=out.logprobs,
            changes=None,
            **self._parameters,
        )
