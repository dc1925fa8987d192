"""Which device and dtype a model runs on."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from pagedinfer.device_check import check_cuda_device
from pagedinfer.errors import DeviceError
from pagedinfer.logging import get_logger

logger = get_logger(__name__)

_BUSY_LOAD = 1.5  # programs that want a core, for each

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FAST_FLAGS = {
    # What /proc/cpuinfo says of a CPU that is faster in the dtype than in float32: it multiplies matrices in
    # it (x86 and Arm), or our own linear layers convert weights as they read them, which takes AVX2.
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16", "avx2"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp", "avx2"},
}


def resolve_device(name: str) -> torch.device:
    """The torch device for "auto", "cuda" or "cpu"; auto is the GPU if there is one that can be used.

    Raises:
        DeviceError: "cuda", and no GPU can be used; the message says why in one line.
    """
    if name == "cpu":
        return torch.device("cpu")
    try:
        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        check_cuda_device(index)
    except DeviceError as error:
        if name == "cuda":
            raise
        logger.info("the CPU is used: %s", error)
        return torch.device("cpu")
    return torch.device("cuda", index)


def warn_if_busy(device: torch.device) -> None:
    """Logs a warning if the device is the CPU and other programs keep its cores busy."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if device.type == "cpu" and load > _BUSY_LOAD * cores:
        logger.warning(
            "other programs keep the cores busy (load average %.1f on %d): steps may take far longer; "
            "OMP_WAIT_POLICY=passive or OMP_NUM_THREADS=1 makes the most of what is left",
            load,
            cores,
        )


def resolve_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is the checkpoint's, or float32 on a CPU that is slower in that."""
    if name != "auto":
        return _DTYPES[name]
    dtype = _DTYPES[checkpoint or "float32"]
    if device.type == "cpu" and not is_fast_on_cpu(dtype):
        logger.info("dtype: float32, since this CPU is slower in %s", checkpoint)
        return torch.float32
    return dtype


def is_fast_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU is at least as fast in `dtype` as in float32: docs/decisions/0008."""
    wanted = _FAST_FLAGS.get(dtype)
    return wanted is None or bool(wanted & _cpu_flags())


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    for line in lines:
        if line.startswith(("flags", "Features")):
            return set(line.partition(":")[2].split())
    return set()
