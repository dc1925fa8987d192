"""vLLM on the workloads of bench_engine.py, in a process of its own: `bench_engine.py --vs vllm` starts it.

It prints a JSON line for each workload. vLLM keeps its defaults, with these exceptions: 256 requests at once
and 8,192 tokens a step, its own sampler, FlashAttention, and no statistics.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from workloads import MARK, timed_on, workload

_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--workloads", required=True)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    vocab_size = json.loads((args.folder / "config.json").read_text())["vocab_size"]
    works = [workload(name, vocab_size) for name in args.workloads.split(",")]

    start = time.perf_counter()
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(args.folder),
        load_format="dummy" if args.dummy else "auto",
        dtype=args.dtype,
        skip_tokenizer_init=True,
        max_model_len=max(work.max_context for work in works) + 16,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
        attention_config={"backend": "FLASH_ATTN"},
        disable_log_stats=True,
    )
    print(f"   vllm  ready after {time.perf_counter() - start:.1f} s", flush=True)

    for work in works:
        print(MARK + json.dumps(timed_on(llm, SamplingParams, work, args.repeats)), flush=True)


if __name__ == "__main__":
    main()
