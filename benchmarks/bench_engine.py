"""Tokens a second of the whole engine, offline, beside transformers' `generate` in the same run.

    python benchmarks/bench_engine.py --model FOLDER --workloads 1x64x128,16x64x128 --vs transformers
    python benchmarks/bench_engine.py --model llama-3-8b --workloads W1,W3,W6b

`--model` is a folder with weights, or a name of benchmarks/model_shapes.py: that shape with random
weights. Requests are greedy token ids that ignore EOS, so that every engine generates the same number of
tokens; W2s samples. After a short warm-up each workload runs `--repeats` times, the prefix cache reset in
between, and the best run counts. `--profile` runs each workload once more and shows where the time of a step
goes.

Peers run the same after it, on the same machine (`--vs`). transformers runs each batch as one static,
left-padded batch, which waits for its slowest request. vLLM runs in a process of its own, from the same
environment or from `--vllm-path`; llama.cpp too, on a CPU, by the llama-cpp-python of `--llama-python`, with
the same weights in `--gguf`.

What continuous batching gains over static batches shows in one engine by `--workloads W1,W1/50
--max-num-seqs 50`, and what batching gains at all by `--workloads W6a,W6b`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from model_shapes import SHAPES, write_shape
from plots import draw_bars
from step_profile import StepProfile
from workloads import DESCRIPTIONS, MARK, Batch, Workload, generate_batch, timed, timed_on, workload


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder, or one of " + ", ".join(SHAPES))
    parser.add_argument("--workloads", default="1x64x128,16x64x128", help="names, comma-separated")
    parser.add_argument("--vs", default="", help="peers, comma-separated: transformers, vllm, llama.cpp")
    parser.add_argument("--vllm-path", default="", help="a folder with vllm, for PYTHONPATH")
    parser.add_argument("--gguf", type=Path, help="the model for llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-async-scheduling", action="store_true", help="steps do not overlap")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="show where a step's time goes")
    parser.add_argument("--json", type=Path, help="write the results here too")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:
        random_weights = args.model in SHAPES
        folder = write_shape(args.model, Path(scratch)) if random_weights else Path(args.model)
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        works = [workload(name, vocab_size) for name in args.workloads.split(",")]
        results: dict[str, Any] = {"machine": machine(), "model": args.model, "rows": []}
        engines = {"pagedinfer": run_pagedinfer}
        peers = {"transformers": run_transformers, "vllm": run_vllm, "llama.cpp": run_llama_cpp}
        for name in filter(None, args.vs.split(",")):
            if name not in peers:
                raise SystemExit(f"--vs: unknown peer {name!r}; there are {', '.join(peers)}")
            engines[name] = peers[name]
        for engine, run in engines.items():
            for row in run(folder, random_weights, works, args):
                results["rows"].append({"engine": engine, **row})
                print_row(results["rows"][-1])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(results, args.plot)


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gpu": gpu,
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def plot(results: dict[str, Any], path: Path) -> None:
    """A bar for each engine and workload."""
    bars = []
    for row in results["rows"]:
        name, _, size = row["workload"].partition("/")
        label = f"{row['engine']}: {DESCRIPTIONS.get(name, name)}"
        bars.append((label + f", in batches of {size}" * bool(size), row["output_tok_s"]))
    where = results["machine"]
    device = f"{where['threads']} threads of a CPU"
    machine = f"{where['gpu'] or device}, torch {where['torch']}"
    draw_bars(path, f"output tokens a second, {Path(results['model']).name}", bars, machine)


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['engine']:>13}  {row['workload']:>12}  {row['seconds']:8.2f} s  "
        f"input {row['input_tok_s']:10,.1f} tok/s  output {row['output_tok_s']:10,.1f} tok/s",
        flush=True,
    )


def run_pagedinfer(
    folder: Path, random_weights: bool, works: list[Workload], args: argparse.Namespace
) -> list[dict[str, Any]]:
    start = time.perf_counter()
    from pagedinfer import LLM, SamplingParams

    llm = LLM(
        str(folder),
        dtype=args.dtype,
        device=args.device,
        load_format="dummy" if random_weights else "auto",
        max_model_len=max(work.max_context for work in works) + 16,
        skip_tokenizer_init=True,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        enforce_eager=args.enforce_eager,
        tensor_parallel_size=args.tensor_parallel_size,
        async_scheduling=False if args.no_async_scheduling else None,
    )
    print(f"   pagedinfer  ready after {time.perf_counter() - start:.1f} s", flush=True)

    with llm:
        rows = [timed_on(llm, SamplingParams, work, args.repeats) for work in works]
        if args.profile:
            profile = StepProfile(llm.llm_engine)
            for work, row in zip(works, rows, strict=True):
                llm.reset_prefix_cache()
                profile.clear()
                for batch in work.batches:
                    generate_batch(llm, SamplingParams, batch, work.sampling)
                print(f"   pagedinfer  {work.name}: where a step's time goes, medians")
                profile.print_table()
                row["profile"] = profile.table()
    return rows


def run_transformers(
    folder: Path, random_weights: bool, works: list[Workload], args: argparse.Namespace
) -> list[dict[str, Any]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    device = args.device if args.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "auto" if args.dtype == "auto" else getattr(torch, args.dtype)
    if random_weights:
        config = AutoConfig.from_pretrained(folder)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    model.eval()

    def generate(batch: Batch) -> int:
        longest_in = max(len(prompt) for prompt, _ in batch)
        longest_out = max(length for _, length in batch)
        ids = torch.zeros(len(batch), longest_in, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(batch):
            ids[row, longest_in - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest_in - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                do_sample=False,
                min_new_tokens=longest_out,
                max_new_tokens=longest_out,
                pad_token_id=0,
            )
        if out.shape[1] != longest_in + longest_out:
            raise SystemExit("transformers generated another number of tokens than asked for")
        return sum(length for _, length in batch)

    rows = []
    for work in works:
        generate([(prompt, min(length, 8)) for prompt, length in work.batches[0][:8]])
        rows.append(timed(work, args.repeats, generate, lambda: None))
    return rows


def run_vllm(
    folder: Path, random_weights: bool, works: list[Workload], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """See vllm_peer.py."""
    environment = dict(os.environ)
    if args.vllm_path:
        environment["PYTHONPATH"] = os.pathsep.join([args.vllm_path, environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("vllm_peer.py")), str(folder)]
    command += ["--workloads", ",".join(work.name for work in works), "--dtype", args.dtype]
    command += ["--repeats", str(args.repeats)] + ["--dummy"] * random_weights
    return rows_of_process(command, environment)


def run_llama_cpp(
    folder: Path, random_weights: bool, works: list[Workload], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """See llama_cpp_peer.py."""
    if args.gguf is None:
        raise SystemExit("--vs llama.cpp needs --gguf FILE, the model for it")
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    command = [args.llama_python, str(Path(__file__).with_name("llama_cpp_peer.py")), str(args.gguf)]
    command += ["--workloads", ",".join(work.name for work in works), "--vocab-size", str(vocab_size)]
    command += ["--threads", str(torch.get_num_threads()), "--repeats", str(args.repeats)]
    return rows_of_process(command, dict(os.environ))


def rows_of_process(command: list[str], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Runs a peer's script; its results are lines that begin with MARK, the rest passes through."""
    rows = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
            else:
                print(line, end="", flush=True)
    if process.returncode:
        raise SystemExit(
            f"{Path(command[1]).name} ended with {process.returncode} after {len(rows)} workloads"
        )
    return rows


if __name__ == "__main__":
    main()
