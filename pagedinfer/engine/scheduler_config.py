"""What the scheduler is told about its limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pagedinfer.parameter_checks import check_choice


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of a scheduler.

    Raises ValueError for values that make no sense together.
    """

    max_num_seqs: int = 256  # requests that run at once: the number of slots
    max_num_batched_tokens: int = 8192  # token budget: the most that a step computes
    block_size: int = 16  # tokens in a KV block
    num_blocks: int  # KV blocks on the device
    num_cpu_blocks: int = 0  # KV blocks in pinned CPU memory, for swap and the second cache tier
    max_model_len: int  # the longest context, prompt and output together
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step or not yet
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    preemption_mode: Literal["auto", "swap", "recompute"] = "auto"
    admission_policy: Literal["forecast", "greedy"] = "forecast"  # greedy: whatever has room for its prompt
    long_prefill_token_threshold: int = 0  # the most tokens of one prompt in a step; 0: no such limit
    cascade_attention: bool = False  # the runner can read a prefix that requests share once for all of them
    watermark: float = 0.0  # share of the blocks that admission leaves free for those that run
    urgent_lane: bool = False  # steps of urgent prompts can run beside those under way

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_cpu_blocks", "long_prefill_token_threshold"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        check_choice("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        check_choice("preemption_mode", self.preemption_mode, ("auto", "swap", "recompute"))
        check_choice("admission_policy", self.admission_policy, ("forecast", "greedy"))
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"without chunked prefill a step must have room for the longest prompt: "
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, max_model_len is "
                f"{self.max_model_len}; raise the first, or set enable_chunked_prefill=True"
            )

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the device's blocks have room for."""
        return self.num_blocks * self.block_size
