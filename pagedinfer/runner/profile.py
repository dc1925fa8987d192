"""The largest step that the engine may ever run, and how much GPU memory it takes."""

from __future__ import annotations

import torch

from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.sampling_params import SamplingParams


def largest_batch(*, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> Batch:
    """A batch of as many tokens and as many sampled rows as the limits allow, in the longest chunks.

    Its requests all use block 0, whose contents do not matter.
    """
    num_requests = min(max_num_seqs, max_num_batched_tokens)
    left = max_num_batched_tokens
    batch = Batch(step=0)
    params = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, presence_penalty=0.1)
    for slot in range(num_requests):
        others = num_requests - slot - 1
        length = min(max_model_len, left - others)
        left -= length
        batch.admitted.append(
            AdmittedRequest(
                request_id=str(slot),
                slot=slot,
                token_ids=[0] * length,
                num_prompt_tokens=length,
                block_ids=[],
                sampling_params=params,
                seed=slot,
            )
        )
        batch.requests.append(ScheduledRequest(str(slot), slot, 0, length, sample=True, new_block_ids=[]))
    return batch


class GpuMemoryMeter:
    """What this process takes of a GPU from the meter's creation on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.empty_cache()
        free, self.total = torch.cuda.mem_get_info(device)
        self._reserved = torch.cuda.memory_reserved(device)
        self.free = free
        """Bytes that were free when the meter was made."""
        torch.cuda.reset_peak_memory_stats(device)

    def reset_peak(self) -> None:
        """Begins a new peak with what is in use now."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_reserved(self) -> int:
        """The most bytes that torch's allocator has held, beyond what it held at the beginning."""
        return torch.cuda.max_memory_reserved(self._device) - self._reserved

    def held(self) -> int:
        """Bytes that torch's allocator holds now, beyond what it held at the beginning."""
        return torch.cuda.memory_reserved(self._device) - self._reserved

    def outside_torch(self) -> int:
        """Bytes gone that torch's allocator does not hold: kernels, cuBLAS, another process that came."""
        torch.cuda.synchronize(self._device)
        free, _ = torch.cuda.mem_get_info(self._device)
        return max(0, self.free - free - self.held())
