"""Which device and dtype a model runs on."""

from __future__ import annotations

from pathlib import Path

import torch

from pagedinfer.logging import get_logger

logger = get_logger(__name__)

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_NATIVE_FLAGS = {
    # What /proc/cpuinfo says of a CPU with matrix instructions for the dtype: x86 and Arm.
    torch.bfloat16: {"avx512_bf16", "amx_bf16", "bf16"},
    torch.float16: {"avx512_fp16", "amx_fp16", "asimdhp"},
}


def resolve_device(name: str) -> torch.device:
    """The torch device for "auto", "cuda" or "cpu"; auto is the GPU if there is one that can be used.

    Raises:
        ValueError: "cuda", and no GPU can be used; the message says why in one line.
    """
    if name == "cpu":
        return torch.device("cpu")
    reason = why_no_cuda()
    if reason is None:
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise ValueError(f"device='cuda' cannot be used: {reason}")
    logger.info("no GPU is used: %s", reason)
    return torch.device("cpu")


def why_no_cuda() -> str | None:
    """Why no GPU can be used, in one line; None if one can."""
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return f"torch finds no GPU: {str(error).splitlines()[0]}"
    if torch.cuda.device_count() == 0:
        return "torch finds no GPU"
    if not torch._C._dispatch_has_kernel_for_dispatch_key("pagedinfer::store_kv", "CUDA"):
        return "pagedinfer was built without CUDA: its kernels are for the CPU only (no nvcc was found)"
    return None


def resolve_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The torch dtype of a name; "auto" is the checkpoint's, or float32 on a CPU that has not got that."""
    if name != "auto":
        return _DTYPES[name]
    dtype = _DTYPES[checkpoint or "float32"]
    if device.type == "cpu" and not is_native_on_cpu(dtype):
        logger.info("dtype: float32, since this CPU has no native %s", checkpoint)
        return torch.float32
    return dtype


def is_native_on_cpu(dtype: torch.dtype) -> bool:
    """Whether this machine's CPU multiplies matrices in `dtype` without going through float32."""
    wanted = _NATIVE_FLAGS.get(dtype)
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
