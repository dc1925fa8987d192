"""A small random model from its folder to tokens, and the same tokens on the CPU.

python -m tests.smoke_run --device cuda
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from pagedinfer import LLM, SamplingParams
from tests.tiny_models import VOCAB_SIZE, make_llama

NUM_REQUESTS, NUM_TOKENS = 16, 32


def generate(folder: Path, device: str) -> tuple[list[list[int]], float]:
    """Greedy tokens of every request, in float32, and the seconds that they took."""
    prompts = [
        {"prompt_token_ids": [(7 * i + j) % VOCAB_SIZE for j in range(1 + 17 * i)]}
        for i in range(NUM_REQUESTS)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(folder), device=device, dtype="float32", max_num_batched_tokens=256) as llm:
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return [list(output.outputs[0].token_ids) for output in outputs], seconds


def main() -> None:
    """Exits with a message if the two devices' tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as scratch:
        make_llama(Path(scratch))
        tokens, seconds = generate(Path(scratch), device)
        expected, _ = generate(Path(scratch), "cpu")
    for i, (got, wanted) in enumerate(zip(tokens, expected, strict=True)):
        if got != wanted:
            raise SystemExit(f"request {i}: {device} generated {got}, the CPU {wanted}")
    total = NUM_REQUESTS * NUM_TOKENS
    print(f"{total} tokens of {NUM_REQUESTS} requests on {device} in {seconds:.2f} s, the same as on the CPU")


if __name__ == "__main__":
    main()
