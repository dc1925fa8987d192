"""How much memory there is, and how large a KV cache fits in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedinfer.errors import OutOfMemoryError
from pagedinfer.logging import get_logger

logger = get_logger(__name__)

GIB = 1 << 30
MIB = 1 << 20

_LARGE_GPU = 70 * GIB


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device's memory."""

    total: int
    free: int  # for us: what other processes use is not


@dataclass(frozen=True, slots=True)
class KVCacheSize:
    """How many blocks there are to be, and the longest request that the engine takes."""

    num_blocks: int
    max_model_len: int  # tokens


def describe_bytes(count: int) -> str:
    """ "4.8 GiB", "312 MiB" or "20 KiB"."""
    if count >= GIB:
        return f"{count / GIB:,.1f} GiB"
    if count >= MIB:
        return f"{count / MIB:,.0f} MiB"
    return f"{count / 1024:,.0f} KiB"


def cpu_memory(root: Path = Path("/")) -> Memory:
    """This machine's memory, or that of the container (cgroup v2 or v1) where it is less."""
    fields = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    total, free = fields["MemTotal"], fields["MemAvailable"]
    for folder, limit_file, usage_file, cache_field in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = int((root / folder / limit_file).read_text())  # "max" is no number: no limit
            used = int((root / folder / usage_file).read_text())
            statistics = (root / folder / "memory.stat").read_text().split()
        except (OSError, ValueError):
            continue
        if limit < total:
            reclaimable = dict(zip(statistics[::2], statistics[1::2], strict=False)).get(cache_field, "0")
            total, free = limit, min(free, max(0, limit - used + int(reclaimable)))
    return Memory(total, free)


def default_limits(gpu_bytes: int | None) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens, by the memory of the GPU; None: on a CPU."""
    if gpu_bytes is None:
        return 256, 2048
    return (1024, 16384) if gpu_bytes >= _LARGE_GPU else (256, 8192)


def margin(peak_activations: int) -> int:
    """Bytes kept free beside a measured peak: kernels that load later, and fragmentation.

    Llama-3-8B with CUDA graphs, 256 requests of 100 to 1,024 tokens on an H200: a largest step of 2.1 GiB was
    measured, and 542 MiB more than was measured were in use at the peak.
    """
    return 256 * MIB + peak_activations // 4


def size_kv_cache(
    *,
    available_bytes: int,
    block_bytes: int,
    block_size: int,
    model_max_len: int,
    max_model_len: int | None,
    num_blocks_override: int | None,
    memory: Memory,
    parameter: str,
) -> KVCacheSize:
    """How many blocks to allocate, so that a request of the longest length fits.

    Args:
        available_bytes: what there is for the cache.
        block_bytes, block_size: bytes and tokens of a block.
        model_max_len: tokens, the longest that the model takes.
        max_model_len: tokens, as the user asked; None: the model's, lowered with a warning to what fits.
        num_blocks_override: blocks, instead of all that fit.
        memory: of the device, for messages.
        parameter: the one of `LLM` that gives the cache more room on this device, for messages.

    Raises:
        OutOfMemoryError: the cache cannot hold one request of max_model_len tokens, or the override asks
            for more than there is; the message names what was wanted, what there is, and what would fit.
    """
    fitting = max(0, available_bytes) // block_bytes
    num_blocks = fitting if num_blocks_override is None else num_blocks_override
    have = f"of {describe_bytes(memory.total)} in total, {describe_bytes(memory.free)} were free"
    if num_blocks > fitting:
        raise OutOfMemoryError(
            f"num_gpu_blocks_override={num_blocks:,} blocks need {describe_bytes(num_blocks * block_bytes)}, "
            f"and there is room for {fitting:,} ({describe_bytes(max(0, available_bytes))}); {have}"
        )
    if num_blocks_override is not None:
        parameter = "num_gpu_blocks_override"
    num_tokens = num_blocks * block_size
    wanted = model_max_len if max_model_len is None else max_model_len
    if num_tokens >= wanted:
        return KVCacheSize(num_blocks, wanted)
    short = (
        f"a request of {wanted:,} tokens needs {describe_bytes(-(-wanted // block_size) * block_bytes)} of "
        f"KV cache, and there is {describe_bytes(num_blocks * block_bytes)} for it ({num_tokens:,} tokens); "
        f"{have}"
    )
    if num_blocks == 0:
        raise OutOfMemoryError(f"there is no room for a KV cache: {short}. Raise {parameter}")
    if max_model_len is not None:
        raise OutOfMemoryError(
            f"max_model_len={max_model_len} does not fit: {short}. The largest max_model_len that fits is "
            f"{num_tokens}; to have more, raise {parameter}"
        )
    logger.warning("max_model_len is lowered to %d: %s. To have more, raise %s", num_tokens, short, parameter)
    return KVCacheSize(num_blocks, num_tokens)
