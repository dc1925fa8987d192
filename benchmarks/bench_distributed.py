"""What tensor parallelism costs beside the computing.

    python benchmarks/bench_distributed.py driver --ranks 4         # on any machine, no GPU needed
    python benchmarks/bench_distributed.py all-reduce --ranks 2     # on as many GPUs

`driver` sends steps to ranks that compute nothing and answer at once: the time from `execute` to the step's
result is what an engine with ranks has to spend on each step, collectives apart, and one in a single process
has not. `all-reduce` times the sum of a bfloat16 tensor over the ranks: in a CUDA graph, as steps of decodes
have it, by NCCL and over peer memory, alone and with the norm that follows (rows of 4,096); and by NCCL,
one call after another without a graph.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pagedinfer.config import EngineConfig
from pagedinfer.distributed import rank_process, ranks
from pagedinfer.distributed.group import SINGLE_RANK
from pagedinfer.distributed.worker_group import WorkerGroup
from pagedinfer.engine.batch import Batch, ScheduledRequest, StepOutput
from pagedinfer.models.model_config import ModelConfig

SIZES = (8 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20)
CALLS_IN_A_GRAPH = 50


def main() -> None:
    if sys.argv[1:2] == ["rank-that-computes-nothing"]:
        del sys.argv[1]
        rank_that_computes_nothing()
        return
    if sys.argv[1:2] == ["rank-that-sums"]:
        rank_that_sums(*map(int, sys.argv[2:4]), sys.argv[4])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["driver", "all-reduce"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=8, help="in each step of `driver`")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    result = bench_driver(args) if args.what == "driver" else bench_all_reduce(args.ranks)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1))


# ---- the driver ----


class NoWorker:
    """Answers each step at once, with a token for each request."""

    device = torch.device("cpu")
    dtype = torch.float32
    max_num_seqs = max_num_batched_tokens = max_model_len = num_blocks = num_cpu_blocks = block_bytes = 1
    cascade_attention = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def execute(self, batch: Batch) -> NoWorker:
        self._count = len(batch.requests)
        return self

    def wait(self) -> None:
        pass

    def result(self) -> StepOutput:
        return StepOutput(np.zeros(self._count, np.int64), np.zeros(self._count, np.float32))

    def take_swap_timings(self) -> list[tuple[int, float]]:
        return []

    def close(self) -> None:
        pass


def rank_that_computes_nothing() -> None:
    patched: Any = rank_process
    patched.Worker = NoWorker
    patched._join = lambda start, device: SINGLE_RANK
    rank_process.main()


def bench_driver(args: argparse.Namespace) -> dict[str, Any]:
    ranks.PROGRAM = (str(Path(__file__).resolve()), "rank-that-computes-nothing")
    options = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64 * args.ranks,
        "num_attention_heads": args.ranks,
        "num_hidden_layers": 1,
        "intermediate_size": 64 * args.ranks,
        "max_position_embeddings": 64,
        "vocab_size": 64,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(options))
        config = EngineConfig(model=folder, device="cpu", tensor_parallel_size=args.ranks)
        workers = WorkerGroup(config, ModelConfig.from_pretrained(folder))
    requests = [ScheduledRequest(str(i), i, 1000 + i, 1, True, []) for i in range(args.requests)]
    admit(workers, args.requests)
    seconds = []
    for step in range(1, args.steps + 1):
        batch = Batch(step, requests=requests)
        started = time.perf_counter()
        workers.execute(batch).result()
        seconds.append(time.perf_counter() - started)
    workers.close()
    quantiles = np.quantile(seconds, [0.1, 0.5, 0.9, 0.99]) * 1e3
    low, median, high, highest = (float(each) for each in quantiles)
    print(
        f"{args.ranks} ranks, {args.requests} requests, {os.cpu_count()} cores: median {median:.3f} ms a "
        f"step, p10 {low:.3f}, p90 {high:.3f}, p99 {highest:.3f}"
    )
    return {"ranks": args.ranks, "requests": args.requests, "cores": os.cpu_count(), "median_ms": median}


def admit(workers: WorkerGroup, count: int) -> None:
    """Tells the ranks which request is in which slot."""
    from pagedinfer import SamplingParams
    from pagedinfer.engine.batch import AdmittedRequest

    params = SamplingParams()
    admitted = [AdmittedRequest(str(i), i, [0], 1, [0], params, i) for i in range(count)]
    workers.execute(Batch(0, admitted=admitted)).result()


# ---- all-reduce ----


def bench_all_reduce(num_ranks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "rank-that-sums"]
        store = os.path.join(folder, "store")
        processes = [
            subprocess.Popen([*command, str(rank), str(num_ranks), store], stdout=subprocess.PIPE, text=True)
            for rank in range(num_ranks)
        ]
        outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("a rank has failed")
    rows = json.loads(outputs[0].splitlines()[-1])
    print(
        f"{num_ranks} x {torch.cuda.get_device_name()}; us an all-reduce, bus bandwidth of the graph by NCCL"
    )
    for row in rows:
        peer, peer_norm = (
            "-" if row[name] is None else f"{row[name]:.1f}" for name in ("peer_us", "peer_norm_us")
        )
        print(
            f"{row['bytes'] >> 10:>6} KiB   in a graph: NCCL {row['nccl_graph_us']:8.1f}   peer memory "
            f"{peer:>8}   with a norm: NCCL {row['nccl_norm_us']:8.1f}   peer memory {peer_norm:>8}   "
            f"NCCL one by one {row['nccl_us']:8.1f}   {row['bus_gb_s']:6.1f} GB/s"
        )
    return {"ranks": num_ranks, "gpu": torch.cuda.get_device_name(), "rows": rows}


def rank_that_sums(rank: int, size: int, store: str) -> None:
    from torch.distributed import FileStore

    from pagedinfer.distributed.peer_all_reduce import PeerAllReduce
    from pagedinfer.distributed.torch_group import join

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = join(rank, size, FileStore(store, size), device, nccl=True, num_local_ranks=size)
    peers = None
    try:
        peers = PeerAllReduce(SIZES[-1], rank, device, group.tell_all)
        peers.check()
    except RuntimeError as error:
        print(f"rank {rank}: no peer memory: {error}", file=sys.stderr)
    if not group.least([peers is not None])[0]:
        peers = None
    rows = []
    weight = torch.ones(4096, dtype=torch.bfloat16, device=device)
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        norm = tensor.view(-1, 4096), torch.zeros_like(tensor).view(-1, 4096), weight, 1e-5
        row: dict[str, Any] = {"bytes": num_bytes, "peer_us": None, "peer_norm_us": None}
        row["nccl_us"] = time_alone(lambda t=tensor: group.all_reduce(t))
        row["nccl_graph_us"] = time_in_graph(lambda t=tensor: group.all_reduce(t))
        row["nccl_norm_us"] = time_in_graph(lambda args=norm: group.all_reduce_norm(*args))
        row["bus_gb_s"] = 2 * (size - 1) / size * num_bytes / row["nccl_graph_us"] / 1e3
        if peers is not None and peers.takes(tensor):
            check_sum(peers, tensor, rank, size)
            tensor.zero_()
            row["peer_us"] = time_in_graph(lambda t=tensor: peers.all_reduce(t))
            row["peer_norm_us"] = time_in_graph(lambda args=norm: peers.all_reduce_norm(*args))
        rows.append(row)
    print(json.dumps(rows), flush=True)
    torch.cuda.synchronize()
    group.least([0])  # nobody waits for anybody any more
    os._exit(0)  # NCCL may take its time to end


def check_sum(peers: Any, tensor: torch.Tensor, rank: int, size: int) -> None:
    places = torch.arange(tensor.numel(), device=tensor.device) % 64
    for i in range(20):
        tensor.copy_(places + rank + i)
        wanted = sum((places + other + i).bfloat16() for other in range(size))
        peers.all_reduce(tensor)
        if not torch.equal(tensor, wanted):
            raise SystemExit("the sum over peer memory is wrong")


def time_alone(call: Callable[[], object]) -> float:
    """Microseconds of a call among many, launched one after another."""
    return time_of(lambda: [call() for _ in range(CALLS_IN_A_GRAPH)]) / CALLS_IN_A_GRAPH


def time_in_graph(call: Callable[[], object]) -> float:
    """The same where the calls are one graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CALLS_IN_A_GRAPH):
            call()
    return time_of(graph.replay) / CALLS_IN_A_GRAPH


def time_of(run: Callable[[], object]) -> float:
    """The median microseconds of 20 runs, after 5 to warm up."""
    times = []
    for _ in range(25):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return float(np.median(times[5:]))


if __name__ == "__main__":
    main()
