"""One line with both sides' numbers where a GPU cannot be used (vllm#4604, vllm#19906, vllm#4858)."""

from __future__ import annotations

import pytest
import torch

from pagedinfer import DeviceError, device_check
from pagedinfer.device_check import CudaDevice, check_cuda_device, kernel_problem
from pagedinfer.kernel_library import BuildInfo

H200 = CudaDevice("NVIDIA H200", (9, 0), (13, 0))
DEFAULT_ARCHS = ("80-real", "90a-real", "90-virtual")


def built(*archs: str, cuda: str | None = "13.0.88") -> BuildInfo:
    return BuildInfo(torch="2.13.0", cuda=cuda, cuda_archs=archs, compiler="GNU 12.2.0")


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((8, 0), DEFAULT_ARCHS),
        ((8, 6), DEFAULT_ARCHS),  # code for 8.0 runs on all of 8.x
        ((8, 9), ("86-real",)),
        ((9, 0), ("90a-real",)),
        ((9, 0), ("90-real",)),
        ((10, 0), DEFAULT_ARCHS),  # through the PTX
        ((12, 0), ("90-virtual",)),
        ((10, 3), ("100f-real",)),
    ],
)
def test_kernels_that_run(capability: tuple[int, int], archs: tuple[str, ...]) -> None:
    assert kernel_problem(CudaDevice("GPU", capability, (13, 0)), built(*archs)) is None


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ((7, 5), DEFAULT_ARCHS),
        ((8, 0), ("86-real",)),  # code for 8.6 does not run on 8.0
        ((9, 0), ("80-real",)),
        ((10, 0), ("90a-real", "90a-virtual")),  # what ends in "a" carries nowhere
        ((12, 0), ("100f-real",)),
        ((8, 9), ("90-virtual",)),
    ],
)
def test_kernels_that_do_not(capability: tuple[int, int], archs: tuple[str, ...]) -> None:
    message = kernel_problem(CudaDevice("NVIDIA Something", capability, (13, 0)), built(*archs))
    assert message is not None
    assert f"the NVIDIA Something is sm_{capability[0]}{capability[1]}" in message
    assert "\n" not in message
    for arch in archs:
        assert arch.split("-")[0] in message


def test_the_message_says_what_to_build() -> None:
    message = kernel_problem(H200, built("80-real", "100-virtual"))
    assert message is not None
    assert "pagedinfer was built for sm_80, compute_100 (PTX)" in message
    assert "PAGEDINFER_CUDA_ARCHS=90a" in message


def test_a_driver_older_than_the_runtime_is_told_with_both_versions() -> None:
    old = CudaDevice("NVIDIA A100", (8, 0), (12, 4))
    message = kernel_problem(old, built(*DEFAULT_ARCHS))
    assert message is not None
    assert "driver supports CUDA 12.4" in message
    assert "built with CUDA 13.0" in message
    # Within a major version an older driver runs compiled code, but cannot translate newer PTX.
    assert kernel_problem(old, built("80-real", cuda="12.9.1")) is None
    message = kernel_problem(
        CudaDevice("NVIDIA B200", (10, 0), (12, 8)), built(*DEFAULT_ARCHS, cuda="12.9.1")
    )
    assert message is not None
    assert "CUDA 12.8" in message
    assert "CUDA 12.9" in message


def test_kernels_without_cuda() -> None:
    message = kernel_problem(H200, built(cuda=None))
    assert message is not None
    assert "built without CUDA" in message
    assert "NVIDIA H200" in message


def test_a_build_without_a_record_is_left_to_try() -> None:
    assert kernel_problem(H200, None) is None


def test_without_a_gpu_the_reason_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match="needs a CUDA build of torch") as error:
        check_cuda_device()
    assert torch.__version__ in str(error.value)

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for driver, reason in (
        (None, "no driver is here"),
        ((12, 2), r"driver supports CUDA 12\.2, but torch .* was built with CUDA 13\.0"),
        ((13, 0), "CUDA_VISIBLE_DEVICES"),
    ):
        monkeypatch.setattr(device_check, "driver_cuda_version", lambda driver=driver: driver)
        with pytest.raises(DeviceError, match=reason) as error:
            check_cuda_device()
        assert "\n" not in str(error.value)


@pytest.mark.gpu
def test_this_gpu_can_be_used() -> None:
    check_cuda_device(0)
    driver = device_check.driver_cuda_version()
    assert driver is not None
    assert driver >= (12, 0)


@pytest.mark.gpu
def test_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=f"there is no GPU {count}: torch sees {count}"):
        check_cuda_device(count)
