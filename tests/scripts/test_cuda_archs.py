"""Which GPUs the kernels are compiled for."""

from __future__ import annotations

import pytest
from kernel_build import cuda_archs as module
from kernel_build.cuda_archs import DEFAULT_ARCHS, arch_of, cuda_archs, parse_archs
from kernel_build.errors import BuildError
from kernel_build.toolchain import Nvcc

NVCC = Nvcc("nvcc", (13, 0))
SUPPORTED = {"75", "80", "86", "89", "90", "100", "120"}


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("90a", ("90a-real",)),
        ("80;90a", ("80-real", "90a-real")),
        ("8.0, 9.0a", ("80-real", "90a-real")),
        ("sm_86 compute_100f", ("86-real", "100f-real")),
        ("90-virtual", ("90-virtual",)),
        ("8.6+PTX", ("86-real", "86-virtual")),
        ("12.0 120", ("120-real",)),
    ],
)
def test_spellings(text: str, archs: tuple[str, ...]) -> None:
    assert parse_archs(text) == archs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hopper", "'hopper' is not an architecture"),
        ("75", "75 is too old"),
        (" ; ", "names no architecture"),
    ],
)
def test_wrong_ones_are_refused(text: str, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        parse_archs(text)


def test_the_variable_comes_first_then_the_gpus_here_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "supported_archs", lambda nvcc: SUPPORTED)
    monkeypatch.setattr(module, "present_gpus", lambda: [(9, 0), (8, 6), (9, 0)])
    monkeypatch.setenv("PAGEDINFER_CUDA_ARCHS", "80")
    assert cuda_archs(NVCC) == ("80-real",)
    monkeypatch.delenv("PAGEDINFER_CUDA_ARCHS")
    assert cuda_archs(NVCC) == ("90a-real", "86-real")
    monkeypatch.setattr(module, "present_gpus", lambda: [])
    assert cuda_archs(NVCC) == DEFAULT_ARCHS


def test_a_gpu_newer_than_nvcc_gets_ptx() -> None:
    assert arch_of((12, 0), SUPPORTED) == "120-real"
    assert arch_of((13, 5), SUPPORTED) == "90-virtual"


def test_gpus_that_are_too_old_are_left_out_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answer:
        stdout = "7.5\n9.0\n"

    monkeypatch.setattr(module.subprocess, "run", lambda *args, **kwargs: Answer)
    assert module.present_gpus() == [(9, 0)]
    assert "sm_75 GPU is too old" in capsys.readouterr().out
