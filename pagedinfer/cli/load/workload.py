"""Random requests, the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pagedinfer.parameter_checks import integer


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of a server. Prompts are random token ids, in chats random words."""

    model: str
    vocab_size: int
    num_requests: int
    input_len: int  # tokens; in a chat words, beside which the template puts its own
    output_len: int  # tokens
    prefix_len: int = 0  # tokens that all prompts begin with
    range_ratio: float = 0.0  # lengths are uniform in [1 - it, 1 + it] times the above
    seed: int = 0
    ignore_eos: bool = True
    extra_body: dict[str, Any] = field(default_factory=dict)
    chat: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.range_ratio < 1.0:
            raise ValueError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}")
        if min(self.num_requests, self.input_len, self.output_len) < 1:
            raise ValueError(
                f"--num-prompts, --random-input-len and --random-output-len must be at least 1, got "
                f"{self.num_requests}, {self.input_len} and {self.output_len}"
            )
        integer("--random-prefix-len", self.prefix_len, 0)

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The bodies of the requests."""
        rng = random.Random(self.seed)
        first = min(1000, self.vocab_size // 4)  # special tokens and single bytes come first in most
        tokens = range(first, self.vocab_size)
        prefix = rng.choices(tokens, k=self.prefix_len)
        for _ in range(self.num_requests):
            prompt = prefix + rng.choices(tokens, k=self._length(rng, self.input_len))
            body: dict[str, Any] = {
                "model": self.model,
                "max_tokens": self._length(rng, self.output_len),
                "temperature": 0.0,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            if self.ignore_eos:
                body["ignore_eos"] = True
            if self.chat:
                text = " ".join(f"{token:x}" for token in prompt)
                body["messages"] = [{"role": "user", "content": text}]
            else:
                body["prompt"] = prompt
            yield body | self.extra_body

    def _length(self, rng: random.Random, length: int) -> int:
        low = max(1, int(length * (1 - self.range_ratio)))
        return rng.randint(low, max(low, int(length * (1 + self.range_ratio))))
