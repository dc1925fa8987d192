"""Prints what a bug report needs: versions, the build of the kernels, devices and memory. No secrets."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from pagedinfer import __version__
from pagedinfer.cli.http_client import API_KEY_VARIABLE

if TYPE_CHECKING:
    from pagedinfer.cli.parser import Parser

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "llguidance",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "msgspec",
    "pyzmq",
    "prometheus-client",
)
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "LD_LIBRARY_PATH",
    "OMP_NUM_THREADS",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def add_arguments(parser: Parser) -> None:
    """Adds the command's flags."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Prints the environment on stdout."""
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    for section, values in found.items():
        print(f"{section}:")
        for name, value in values.items():
            print(f"  {name}: {value}")
    return 0


def collect() -> dict[str, dict[str, str]]:
    """Sections with names and values. What cannot be found out says so, in place of its value."""
    return {
        "pagedinfer": {"version": __version__, **_build()},
        "system": _system(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": _devices(),
        "environment": _environment(),
    }


def _build() -> dict[str, str]:
    try:
        from pagedinfer.kernel_library import build_info, load_kernels

        info = build_info()
        found = {"kernels": "load"}
        try:
            load_kernels()
        except ImportError as error:
            found["kernels"] = str(error)
    except Exception as error:  # torch itself may not load: that is what the report is about
        return {"kernels": f"torch cannot be imported: {error}"}
    if info is None:
        return found | {"build": "no record"}
    archs = ", ".join(info.cuda_archs) or "none"
    return found | {
        "built with torch": info.torch,
        "built with CUDA": f"{info.cuda} for {archs}" if info.cuda else "no: CPU kernels only",
        "compiler": info.compiler,
    }


def _system() -> dict[str, str]:
    found = {
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "processors": str(len(os.sched_getaffinity(0))),
    }
    try:
        from pagedinfer.runner.memory import cpu_memory, describe_bytes

        memory = cpu_memory()
        found["memory"] = f"{describe_bytes(memory.free)} free of {describe_bytes(memory.total)}"
    except Exception as error:
        found["memory"] = f"unknown: {error}"
    return found


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _environment() -> dict[str, str]:
    """The variables of others that matter here, and all of ours but the one that is a secret."""
    ours = sorted(name for name in os.environ if name.startswith("PAGEDINFER_") and name != API_KEY_VARIABLE)
    return {name: os.environ[name] for name in (*_VARIABLES, *ours) if name in os.environ}


def _devices() -> dict[str, str]:
    try:
        import torch

        from pagedinfer.device_check import driver_cuda_version
        from pagedinfer.runner.memory import describe_bytes

        driver = driver_cuda_version()
        found = {
            "CUDA of torch": torch.version.cuda or "none",
            "CUDA of the driver": "no driver" if driver is None else f"{driver[0]}.{driver[1]}",
        }
        for i in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(i)
            found[f"GPU {i}"] = f"{gpu.name}, {gpu.major}.{gpu.minor}, {describe_bytes(gpu.total_memory)}"
        return found
    except Exception as error:
        return {"torch": f"cannot be asked: {error}"}
