"""What it costs to give up a request's KV blocks: moving them to the CPU and back, or computing again."""

from __future__ import annotations

from typing import Literal

PreemptionKind = Literal["swap", "recompute"]

# How much of an old measurement survives a new one.
_MEMORY = 0.8


class PreemptionCosts:
    """Rates that decide between swap and recomputation, from guesses to what was measured.

    Whoever runs the steps reports what it measures through `observe_swap` and `observe_prefill`; the
    rates can also be set. The estimates are in seconds.
    """

    def __init__(
        self,
        block_bytes: int = 2 << 20,
        swap_bytes_per_second: float = 25e9,
        prefill_tokens_per_second: float = 10_000.0,
    ) -> None:
        """The defaults: 16 tokens of an 8B model in bf16, and a modest GPU behind PCIe 4."""
        self.block_bytes = block_bytes  # of one KV block, all layers
        self.swap_bytes_per_second = swap_bytes_per_second  # one way
        self.prefill_tokens_per_second = prefill_tokens_per_second

    def observe_swap(self, num_blocks: int, seconds: float) -> None:
        """`num_blocks` were moved in one direction within `seconds`."""
        if num_blocks > 0 and seconds > 0:
            rate = num_blocks * self.block_bytes / seconds
            self.swap_bytes_per_second += (1 - _MEMORY) * (rate - self.swap_bytes_per_second)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` within `seconds`; only steps of many tokens tell the rate."""
        if num_tokens > 0 and seconds > 0:
            rate = num_tokens / seconds
            self.prefill_tokens_per_second += (1 - _MEMORY) * (rate - self.prefill_tokens_per_second)

    def transfer_seconds(self, num_blocks: int) -> float:
        """One way."""
        return num_blocks * self.block_bytes / self.swap_bytes_per_second

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens / self.prefill_tokens_per_second

    def prefer_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether moving a request out and in again is cheaper than computing its tokens again."""
        return 2 * self.transfer_seconds(num_blocks) <= self.recompute_seconds(num_tokens)

    def prefer_fetch(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether bringing cached blocks back from the CPU is cheaper than computing them again."""
        return self.transfer_seconds(num_blocks) <= self.recompute_seconds(num_tokens)

    def as_dict(self) -> dict[str, float]:
        """The rates, for metrics and logs."""
        return {
            "kv_block_bytes": float(self.block_bytes),
            "swap_bytes_per_second": self.swap_bytes_per_second,
            "prefill_tokens_per_second": self.prefill_tokens_per_second,
        }
