"""Answers some prompts with SmolLM2-135M-Instruct, through the engine: `make demo`.

python scripts/demo.py [--max-tokens N] [your own prompts]
"""

from __future__ import annotations

import argparse
import sys
import time

from pagedinfer import LLM, SamplingParams
from pagedinfer.sample_model import sample_model

PROMPTS = [
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Name three animals that live in the sea.",
    "请用中文介绍一下你自己。",
]


def main() -> int:
    """Runs the demo; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="questions to answer, all in one batch")
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer, in tokens")
    arguments = parser.parse_args()

    model = sample_model()
    with LLM(str(model)) as llm:
        chats = [[{"role": "user", "content": prompt}] for prompt in arguments.prompts]
        params = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens)
        start = time.perf_counter()
        outputs = llm.chat(chats, params)
        seconds = time.perf_counter() - start

    for prompt, output in zip(arguments.prompts, outputs, strict=True):
        print(f"\n>>> {prompt}\n{output.outputs[0].text.strip() or output.error}")
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(
        f"\n{len(outputs)} answers, {num_tokens} tokens in {seconds:.2f} s: "
        f"{num_tokens / seconds:.1f} tokens per second"
    )
    return 0 if all(output.error is None for output in outputs) else 1


if __name__ == "__main__":
    sys.exit(main())
