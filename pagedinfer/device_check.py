"""Tells, before a model is loaded, whether this GPU can run these kernels; else why not, in one line."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

import torch

from pagedinfer.errors import DeviceError
from pagedinfer.kernel_library import BuildInfo, build_info

_REBUILD = "build pagedinfer again"


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """What the machine says of a GPU and its driver."""

    name: str
    """Such as "NVIDIA H200"."""
    capability: tuple[int, int]
    """Compute capability, such as (9, 0)."""
    driver: tuple[int, int] | None
    """The newest CUDA that the driver supports, such as (13, 0); None: unknown."""


def check_cuda_device(device_index: int = 0) -> None:
    """Returns if the kernels can run on this GPU.

    Args:
        device_index: as in torch.device("cuda", device_index).

    Raises:
        DeviceError: there is no such GPU, torch or the kernels were built without CUDA, the driver is older
            than the CUDA runtime in the kernels, or nothing was compiled for a GPU of this kind. The
            message is one line with both sides' numbers.
    """
    if torch.version.cuda is None:
        raise DeviceError(
            f'device "cuda" needs a CUDA build of torch, and torch {torch.__version__} is not one; '
            'install one, or use device="cpu"'
        )
    driver = driver_cuda_version()
    if not torch.cuda.is_available():
        raise DeviceError(_no_gpu(driver, torch.version.cuda))
    count = torch.cuda.device_count()
    if not 0 <= device_index < count:
        raise DeviceError(f"there is no GPU {device_index}: torch sees {count}, numbered from 0")
    device = CudaDevice(
        name=torch.cuda.get_device_name(device_index),
        capability=torch.cuda.get_device_capability(device_index),
        driver=driver,
    )
    problem = kernel_problem(device, build_info())
    if problem is not None:
        raise DeviceError(problem)


def kernel_problem(device: CudaDevice, info: BuildInfo | None) -> str | None:
    """Why kernels built like this cannot run on this GPU, in one line; None if they can."""
    if info is None:
        return None  # The build left no record: the first launch will tell.
    if info.cuda is None:
        return (
            f"pagedinfer was built without CUDA, so it cannot use the {device.name}; "
            f'{_REBUILD} where nvcc is found (CUDA_HOME, PATH or /usr/local/cuda), or use device="cpu"'
        )
    toolkit = _release(info.cuda)
    if device.driver is not None and device.driver[0] < toolkit[0]:
        return (
            f"the NVIDIA driver supports CUDA {_dotted(device.driver)}, but pagedinfer was built with CUDA "
            f"{_dotted(toolkit)}; update the driver, or {_REBUILD} with CUDA {device.driver[0]}.x"
        )
    fitting = [arch for arch in info.cuda_archs if _runs(arch, device.capability)]
    number = f"{device.capability[0]}{device.capability[1]}"
    wanted = "90a" if number == "90" else number
    if not fitting:
        return (
            f"the {device.name} is sm_{number}, but pagedinfer was built for "
            f"{', '.join(_shown(arch) for arch in info.cuda_archs)}; "
            f"{_REBUILD} with PAGEDINFER_CUDA_ARCHS={wanted}"
        )
    only_ptx = all(arch.endswith("-virtual") for arch in fitting)
    if only_ptx and device.driver is not None and device.driver < toolkit:
        return (
            f"the {device.name} (sm_{number}) needs its code translated by the driver, which supports CUDA "
            f"{_dotted(device.driver)}, but pagedinfer was built with CUDA {_dotted(toolkit)}; update the "
            f"driver, or {_REBUILD} with PAGEDINFER_CUDA_ARCHS={wanted}"
        )
    return None


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA that the installed driver supports; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _no_gpu(driver: tuple[int, int] | None, torch_cuda: str) -> str:
    if driver is None:
        return 'device "cuda" needs an NVIDIA GPU and its driver, and no driver is here; use device="cpu"'
    if driver[0] < _release(torch_cuda)[0]:
        return (
            f"the NVIDIA driver supports CUDA {_dotted(driver)}, but torch {torch.__version__} was built "
            f"with CUDA {torch_cuda}; update the driver, or install a torch for CUDA {driver[0]}.x"
        )
    return (
        f"torch sees no NVIDIA GPU, though a driver for CUDA {_dotted(driver)} is here; "
        'look at nvidia-smi and CUDA_VISIBLE_DEVICES, or use device="cpu"'
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether what was compiled as `arch`, in CMake's spelling, runs on a GPU of this compute capability.

    Code runs within a major version, on its own minor and later ones; PTX on every later GPU; code or PTX
    with the suffix "a" on its very own architecture alone, with "f" on its family.
    """
    found = re.fullmatch(r"(\d+)(\d)([af]?)-(real|virtual)", arch)
    if found is None:
        return False
    compiled = (int(found[1]), int(found[2]))
    if found[3] == "a":
        return capability == compiled
    if found[4] == "virtual" and not found[3]:
        return capability >= compiled
    return capability[0] == compiled[0] and capability[1] >= compiled[1]


def _shown(arch: str) -> str:
    name, kind = arch.split("-")
    return f"sm_{name}" if kind == "real" else f"compute_{name} (PTX)"


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
