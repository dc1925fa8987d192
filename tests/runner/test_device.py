"""Which device and dtype are taken."""

from __future__ import annotations

import pytest
import torch

from pagedinfer.errors import DeviceError
from pagedinfer.runner import device as device_module
from pagedinfer.runner.device import resolve_device, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def no_gpu(index: int) -> None:
    raise DeviceError("no driver is here")


def test_the_cpu_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "check_cuda_device", no_gpu)
    assert resolve_device("cpu") == CPU


def test_auto_falls_back_and_cuda_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_module, "check_cuda_device", no_gpu)
    with caplog.at_level("INFO", "pagedinfer"):
        assert resolve_device("auto") == CPU
    assert "the CPU is used: no driver is here" in caplog.text
    with pytest.raises(DeviceError, match=r"^no driver is here$"):
        resolve_device("cuda")


def test_a_gpu_that_can_be_used_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "check_cuda_device", lambda index: None)
    assert resolve_device("auto").type == "cuda"
    assert resolve_device("cuda").type == "cuda"


@pytest.mark.parametrize(
    ("name", "checkpoint", "device", "flags", "expected"),
    [
        ("auto", "bfloat16", CPU, "sse4_2 avx", torch.float32),
        ("auto", "bfloat16", CPU, "avx2 avx512f", torch.bfloat16),
        ("auto", "float16", CPU, "avx2 f16c", torch.float16),
        ("auto", "bfloat16", CPU, "avx2 avx512f avx512_bf16", torch.bfloat16),
        ("auto", "bfloat16", CPU, "amx_bf16", torch.bfloat16),
        ("auto", "bfloat16", CUDA, "avx2", torch.bfloat16),
        ("auto", "float16", CPU, "avx512_bf16", torch.float32),
        ("auto", "float16", CUDA, "", torch.float16),
        ("auto", "float32", CPU, "", torch.float32),
        ("auto", None, CUDA, "", torch.float32),
        ("bfloat16", "float32", CPU, "", torch.bfloat16),
        ("float32", "bfloat16", CUDA, "", torch.float32),
    ],
)
def test_dtype(
    name: str,
    checkpoint: str | None,
    device: torch.device,
    flags: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(device_module, "_cpu_flags", lambda: set(flags.split()))
    with caplog.at_level("INFO", "pagedinfer"):
        assert resolve_dtype(name, checkpoint, device) == expected
    fell_back = name == "auto" and checkpoint not in (None, "float32") and expected == torch.float32
    assert ("is slower in" in caplog.text) == fell_back
