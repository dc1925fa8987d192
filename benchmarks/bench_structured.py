"""What structured outputs cost a step of decodes beside the same requests without, on random weights.

    python benchmarks/bench_structured.py [--model llama-3-8b] [--requests 64] [--tokens 128]

The masks come from a script that has them ready, each for what the text before ends with, so what is measured
is the way of tokens to the host and of masks to the device, not a grammar's own work; `--mask-us` lets each
take so long, as one of llguidance does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model_shapes import SHAPES, write_shape

_NUM_MASKS = 8


class ReadyMasks:
    """A matcher that allows an eighth of the vocabulary, by the last token."""

    def __init__(self, vocab_size: int, seconds: float) -> None:
        self._seconds = seconds
        self._last = 0
        ids = np.arange(32 * -(-vocab_size // 32))
        self._masks = [
            np.packbits(ids % _NUM_MASKS == i, bitorder="little").tobytes() for i in range(_NUM_MASKS)
        ]

    def deep_copy(self) -> ReadyMasks:
        return self

    def consume_token(self, token: int) -> None:
        self._last = token

    def compute_bitmask(self) -> bytes:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._masks[(self._last + 1) % _NUM_MASKS]

    def is_stopped(self) -> bool:
        return False

    def is_error(self) -> bool:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3-8b", help="one of " + ", ".join(SHAPES))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--mask-us", type=float, default=0.0, help="microseconds of CPU for a mask")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()

    from pagedinfer import LLM, SamplingParams
    from pagedinfer.engine.grammars import GrammarCompiler

    vocab_size: int = SHAPES[args.model]["vocab_size"]
    GrammarCompiler.matcher = lambda self, params: ReadyMasks(  # type: ignore[method-assign]
        vocab_size, args.mask_us / 1e6
    )
    GrammarCompiler.masks = lambda self, matchers: np.stack(  # type: ignore[method-assign]
        [np.frombuffer(matcher.compute_bitmask(), np.int32) for matcher in matchers]
    )
    prompts: list[Any] = [{"prompt_token_ids": [1000 + i + 7 * j for j in range(32)]} for i in range(256)]
    common: dict[str, Any] = {"max_tokens": args.tokens, "ignore_eos": True, "temperature": 0.0}
    kinds = {
        "none": SamplingParams(**common),
        "allowed_token_ids": SamplingParams(**common, allowed_token_ids=range(5000, 9000)),
        "structured": SamplingParams(**common, structured_outputs={"regex": "x"}),
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_shape(args.model, Path(scratch))
        options: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False}
        with LLM(
            str(folder), skip_tokenizer_init=True, load_format="dummy", device=args.device, **options
        ) as llm:
            for kind, params in kinds.items():
                llm.generate(prompts[: args.requests], SamplingParams(max_tokens=4), use_tqdm=False)
                seconds = []
                for _ in range(2):
                    before = time.perf_counter()
                    llm.generate(prompts[: args.requests], params, use_tqdm=False)
                    seconds.append(time.perf_counter() - before)
                step = 1000 * min(seconds) / args.tokens
                print(
                    f"{args.model}, {args.requests} requests, {kind:<18} {step:7.2f} ms a token of each, "
                    f"{args.requests * args.tokens / min(seconds):8,.0f} tok/s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
