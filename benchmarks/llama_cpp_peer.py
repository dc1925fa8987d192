"""llama.cpp on the workloads of bench_engine.py, in a process of its own: `--vs llama.cpp` starts it.

It prints a JSON line for each workload. The model is a GGUF file, through llama-cpp-python's binding of the C
library: prompts are computed together, then every running request gets a token a step (greedy), and one that
is done leaves the batch, as in llama.cpp's own server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workloads import MARK, Batch, timed, workload


@llama_cpp.llama_log_callback
def _say_nothing(level: int, text: bytes, data: object) -> None:
    """Instead of thousands of lines about its graph; failures come back as results."""


class Generator:
    """A model and room for a workload's requests."""

    def __init__(self, gguf: Path, num_sequences: int, max_context: int, threads: int) -> None:
        model = llama_cpp.llama_model_load_from_file(
            str(gguf).encode(), llama_cpp.llama_model_default_params()
        )
        if model is None:
            raise SystemExit(f"llama.cpp cannot load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = num_sequences
        params.n_ctx = num_sequences * -(-max_context // 256) * 256
        params.n_batch = num_sequences * max_context
        params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(model, params)
        if self.context is None:
            raise SystemExit(f"llama.cpp has no room for {num_sequences} sequences of {max_context} tokens")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self.batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def generate(self, requests: Batch) -> int:
        """Runs the requests together; returns how many tokens came."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        lengths = [len(prompt) for prompt, _ in requests]
        left = [length for _, length in requests]
        inputs = {sequence: prompt for sequence, (prompt, _) in enumerate(requests)}
        while inputs:
            tokens = self._step(inputs, lengths)
            inputs = {}
            for sequence, token in tokens.items():
                left[sequence] -= 1
                lengths[sequence] += 1
                if left[sequence] > 0:
                    inputs[sequence] = [token]
        return sum(length for _, length in requests)

    def _step(self, inputs: dict[int, list[int]], lengths: list[int]) -> dict[int, int]:
        """Computes each sequence's new tokens, the last of its `lengths`; returns the next of each."""
        batch, row, last_row = self.batch, 0, {}
        for sequence, tokens in inputs.items():
            first = lengths[sequence] - len(tokens)
            for i, token in enumerate(tokens):
                batch.token[row], batch.pos[row] = token, first + i
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                batch.logits[row] = i == len(tokens) - 1
                last_row[sequence] = row
                row += 1
        batch.n_tokens = row
        if llama_cpp.llama_decode(self.context, batch) != 0:
            raise SystemExit("llama_decode failed")
        return {sequence: self._best_token(row) for sequence, row in last_row.items()}

    def _best_token(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--vocab-size", type=int, required=True, help="that prompts are drawn from")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    works = [workload(name, args.vocab_size) for name in args.workloads.split(",")]
    llama_cpp.llama_log_set(_say_nothing, None)
    llama_cpp.llama_backend_init()
    start = time.perf_counter()
    most = max(len(batch) for work in works for batch in work.batches)
    generator = Generator(args.gguf, most, max(work.max_context for work in works), args.threads)
    print(f"   llama.cpp  ready after {time.perf_counter() - start:.1f} s", flush=True)
    for work in works:
        generator.generate([(prompt, min(length, 8)) for prompt, length in work.batches[0][:8]])
        print(MARK + json.dumps(timed(work, args.repeats, generator.generate, lambda: None)), flush=True)


if __name__ == "__main__":
    main()
