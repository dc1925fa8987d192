"""The work that the engine benchmarks do: prompts as token ids with exact output lengths.

A workload is a list of batches; the requests of a batch are submitted at once, batches one after another.
Everything is drawn from one seed, so that two engines, or two runs, do the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Batch = list[tuple[list[int], int]]  # (prompt token ids, output tokens) for each request

MARK = "bench_engine row: "
"""What a line begins with that has a result, in what a peer's process prints."""

DESCRIPTIONS = {
    "W1": "200 requests, 64..256 in, 100..300 out",
    "W2": "256 requests, 100..1,024 in, 100..1,024 out",
    "W2s": "W2 with temperature 0.8, top_p 0.95, top_k 50",
    "W3": "1 request, 128 in, 256 out",
    "W4": "256 requests, 2,048 shared and 64 own in, 128 out",
    "W5": "16 requests, 16,384 in, 256 out",
    "W6a": "8 requests one by one, 64 in, 128 out",
    "W6b": "64 requests together, 64 in, 128 out",
    "mixed": "16 requests, 16..128 in, 16..128 out: for a CPU",
}


@dataclass(frozen=True)
class Workload:
    name: str
    batches: list[Batch]

    @property
    def num_requests(self) -> int:
        return sum(len(batch) for batch in self.batches)

    @property
    def input_tokens(self) -> int:
        return sum(len(prompt) for batch in self.batches for prompt, _ in batch)

    @property
    def output_tokens(self) -> int:
        return sum(length for batch in self.batches for _, length in batch)

    @property
    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams, of our engine as of vLLM."""
        if self.name == "W2s":
            return {"temperature": 0.8, "top_p": 0.95, "top_k": 50}
        return {"temperature": 0.0}

    @property
    def max_context(self) -> int:
        return max(len(prompt) + length for batch in self.batches for prompt, length in batch)


class _Draw:
    """Random prompts of one seed, clear of the low ids, which are often special."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(0)
        self._low = min(1000, vocab_size // 4)
        self._high = min(vocab_size, 120_000) - 8

    def lengths(self, low: int, high: int, count: int) -> list[int]:
        return [int(n) for n in self._rng.integers(low, high + 1, size=count)]

    def prompt(self, length: int) -> list[int]:
        return [int(i) for i in self._rng.integers(self._low, self._high, size=length)]


def workload(name: str, vocab_size: int) -> Workload:
    """One of DESCRIPTIONS, or ad hoc `RxIxO`: R requests at once of I tokens in and O out.

    `NAME/N`: the requests of NAME in batches of N, each of which waits for its slowest one (static batching).

    Raises:
        ValueError: a name that is neither.
    """
    draw = _Draw(vocab_size)
    if "/" in name:
        whole, _, size = name.partition("/")
        requests = [request for batch in workload(whole, vocab_size).batches for request in batch]
        return Workload(name, [requests[i : i + int(size)] for i in range(0, len(requests), int(size))])
    if name in ("W1", "W2", "W2s"):
        count, inputs, outputs = (
            (200, (64, 256), (100, 300)) if name == "W1" else (256, (100, 1024), (100, 1024))
        )
        lengths_in, lengths_out = draw.lengths(*inputs, count), draw.lengths(*outputs, count)
        batch = [(draw.prompt(i), o) for i, o in zip(lengths_in, lengths_out, strict=True)]
        return Workload(name, [batch])
    if name == "mixed":
        lengths_in, lengths_out = draw.lengths(16, 128, 16), draw.lengths(16, 128, 16)
        requests = zip(lengths_in, lengths_out, strict=True)
        return Workload(name, [[(draw.prompt(i), o) for i, o in requests]])
    if name == "W3":
        return Workload(name, [[(draw.prompt(128), 256)]])
    if name == "W4":
        shared = draw.prompt(2048)
        return Workload(name, [[(shared + draw.prompt(64), 128) for _ in range(256)]])
    if name == "W5":
        return Workload(name, [[(draw.prompt(16_384), 256) for _ in range(16)]])
    if name in ("W6a", "W6b"):
        requests = [(draw.prompt(64), 128) for _ in range(72)]
        return Workload(name, [[r] for r in requests[:8]] if name == "W6a" else [requests[8:]])
    try:
        count, length_in, length_out = (int(part) for part in name.split("x"))
    except ValueError:
        raise ValueError(
            f"unknown workload {name!r}; known: {', '.join(DESCRIPTIONS)}, or RxIxO such as 16x64x128"
        ) from None
    return Workload(name, [[(draw.prompt(length_in), length_out) for _ in range(count)]])


def generate_batch(llm: Any, params_class: Any, batch: Batch, sampling: dict[str, Any]) -> int:
    """Runs a batch to its end; returns how many tokens came. LLM and SamplingParams are ours or vLLM's."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in batch],
        [
            params_class(max_tokens=length, ignore_eos=True, detokenize=False, **sampling)
            for _, length in batch
        ],
        use_tqdm=False,
    )
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def timed_on(llm: Any, params_class: Any, work: Workload, repeats: int) -> dict[str, Any]:
    """As `timed`, after a short warm-up, by `generate_batch`."""
    warm_up = [(prompt, min(length, 8)) for prompt, length in work.batches[0][:8]]
    generate_batch(llm, params_class, warm_up, work.sampling)
    return timed(
        work,
        repeats,
        lambda batch: generate_batch(llm, params_class, batch, work.sampling),
        llm.reset_prefix_cache,
    )


def timed(
    work: Workload, repeats: int, generate: Callable[[Batch], int], reset: Callable[[], Any]
) -> dict[str, Any]:
    """The best of `repeats` runs. `generate` returns how many tokens it generated."""
    seconds = []
    for _ in range(repeats):
        reset()
        start = time.perf_counter()
        generated = sum(generate(batch) for batch in work.batches)
        seconds.append(time.perf_counter() - start)
        if generated != work.output_tokens:
            raise SystemExit(f"{work.name}: {generated} tokens came, {work.output_tokens} were asked for")
    best = min(seconds)
    return {
        "workload": work.name,
        "requests": work.num_requests,
        "seconds": best,
        "all_seconds": seconds,
        "input_tok_s": work.input_tokens / best,
        "output_tok_s": work.output_tokens / best,
    }
