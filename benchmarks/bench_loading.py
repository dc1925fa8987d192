"""Times the loading of a checkpoint to the GPU beside the rate at which its files can be read.

    python benchmarks/bench_loading.py                                  # writes Llama-3-8B's shape, 16 GB
    python benchmarks/bench_loading.py --layers 8 --folder /scratch --json results/loading.json

The weights are random, in safetensors of up to 5 GB, as checkpoints come. Files are read, and the checkpoint
is loaded, once with the page cache emptied of them (posix_fadvise, which some file systems ignore: the two
read rates tell) and once or more from it. A read is by 8 threads into buffers of 16 MiB that are used again.
Host memory is by how much the resident size grows at most during the load, and that of it which is not of
mapped files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))
import timing
from model_shapes import SHAPES

from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import checkpoint_tensors, load_weights

SHARD_BYTES = 5_000_000_000
CHUNK = 16 << 20
THREADS = 8


def write_checkpoint(folder: Path, layers: int) -> int:
    """Returns its bytes."""
    config = SHAPES["llama-3-8b"] | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(ModelConfig.from_dict(config), torch.bfloat16, torch.device("meta"))
    shapes = {name: torch.Size(stored.shape) for name, stored in checkpoint_tensors(model).items()}
    largest = max(shape.numel() for shape in shapes.values())
    numbers = torch.randn(largest, device="cuda").bfloat16().cpu()
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size + 2 * shape.numel() > SHARD_BYTES:
            shards.append({})
            size = 0
        size += 2 * shape.numel()
        shards[-1][name] = numbers[: shape.numel()].view(shape)
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(shard, file)
        # One buffer serves all tensors; save_file refuses what shares memory.
        save_file({name: tensor.clone() for name, tensor in shard.items()}, folder / file)
        shard.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def drop_from_cache(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_files(folder: Path) -> None:
    """Reads all of them, and keeps nothing."""
    local = threading.local()

    def read(task: tuple[int, int]) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = bytearray(CHUNK)
        os.preadv(task[0], [local.buffer], task[1])

    descriptors = {os.open(file, os.O_RDONLY): file.stat().st_size for file in folder.glob("*.safetensors")}
    tasks = [(each, offset) for each, size in descriptors.items() for offset in range(0, size, CHUNK)]
    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(read, tasks):
            pass
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def resident_peak() -> Iterator[dict[str, int]]:
    """The largest growth, in bytes, of what is resident: in all, and not of mapped files."""
    peak = {"all": 0, "anonymous": 0}
    before = _resident()
    stopped = threading.Event()

    def watch() -> None:
        while not stopped.wait(0.01):
            for kind, size in _resident().items():
                peak[kind] = max(peak[kind], size - before[kind])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        stopped.set()
        watcher.join()


def _resident() -> dict[str, int]:
    fields = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if "Rss" in line
    )
    sizes = {name: int(value.split()[0]) * 1024 for name, value in fields.items()}
    return {"all": sum(sizes.values()), "anonymous": sizes["RssAnon"]}


def seconds_of(action: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    action(*arguments)
    torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoint; removed at the end")
    parser.add_argument("--repeats", type=int, default=2, help="loads from the page cache")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    timing.require_gpu()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        figures = measure(folder, arguments.layers, arguments.repeats)
    finally:
        shutil.rmtree(folder)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


def measure(folder: Path, layers: int, repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}

    def note(name: str, value: float, unit: str) -> None:
        figures[name] = value
        print(f"{name:28} {value:8.2f} {unit}", flush=True)

    torch.empty(1, device="cuda")
    started = time.perf_counter()
    gigabytes = write_checkpoint(folder, layers) / 1e9
    note("checkpoint", gigabytes, "GB")
    note("written in", time.perf_counter() - started, "s")

    model = build_model(ModelConfig.from_pretrained(folder), torch.bfloat16, torch.device("cuda"))

    def load() -> None:
        load_weights(model, folder, use_tqdm=False)

    for where, times in (("from disk", 1), ("from the page cache", repeats)):
        if where == "from disk":
            drop_from_cache(folder)
        read = gigabytes / min(seconds_of(read_files, folder) for _ in range(times))
        note(f"read {where}", read, "GB/s")
        rates = []
        for _ in range(times):
            if where == "from disk":
                drop_from_cache(folder)
            with resident_peak() as peak:
                rates.append(gigabytes / seconds_of(load))
        note(f"loaded {where}", max(rates), "GB/s")
        note("  seconds", gigabytes / max(rates), "s")
        note("  share of the read rate", max(rates) / read, "")
        note("  host memory, all", peak["all"] / 2**30, "GiB")
        note("  host memory, anonymous", peak["anonymous"] / 2**30, "GiB")
    return figures


if __name__ == "__main__":
    main()
