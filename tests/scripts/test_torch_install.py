"""Finding the installed torch without importing it (vllm#2615, vllm#14942)."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
from kernel_build import torch_install
from kernel_build.errors import BuildError
from kernel_build.torch_install import find_torch, read_torch, torch_release


def test_the_folder_that_is_named_wins(fake_torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDINFER_TORCH_DIR", str(fake_torch("2.12.1", cuda="13.0")))
    torch = find_torch()
    assert (torch.version, torch.kind, torch.found_in) == ("2.12.1", "CUDA 13.0", "PAGEDINFER_TORCH_DIR")


def test_a_named_folder_without_torch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDINFER_TORCH_DIR", str(tmp_path))
    with pytest.raises(BuildError, match="is not a torch package"):
        find_torch()


def test_a_torch_that_is_too_old_is_named_with_what_is_needed(
    fake_torch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEDINFER_TORCH_DIR", str(fake_torch("2.10.0+cu128")))
    with pytest.raises(BuildError, match=r"torch 2\.10\.0\+cu128 is too old.*torch >= 2\.11") as error:
        find_torch()
    assert "\n" not in str(error.value)


def test_a_torch_without_headers_is_an_error(fake_torch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEDINFER_TORCH_DIR", str(fake_torch("2.13.0", headers=False)))
    with pytest.raises(BuildError, match="has no headers"):
        find_torch()


def test_the_first_folder_that_holds_torch_is_taken(
    fake_torch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDINFER_TORCH_DIR", raising=False)
    fake_torch("2.13.0", where=tmp_path / "second")
    fake_torch("2.14.0", where=tmp_path / "third")
    (tmp_path / "first").mkdir()
    folders = [(name, tmp_path / name) for name in ("first", "second", "third")]
    monkeypatch.setattr(torch_install, "site_directories", lambda: iter(folders))
    assert (find_torch().version, find_torch().found_in) == ("2.13.0", "second")


def test_no_torch_at_all_says_where_it_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEDINFER_TORCH_DIR", raising=False)
    monkeypatch.setattr(torch_install, "site_directories", lambda: iter([("here", tmp_path)]))
    with pytest.raises(BuildError, match=rf"no torch found.*torch >= 2\.11.*{tmp_path}"):
        find_torch()


def test_the_torch_of_this_environment_is_found_and_not_imported(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDINFER_TORCH_DIR", raising=False)
    import torch

    code = (
        f"import sys; sys.path.insert(0, {str(root / 'scripts')!r})\n"
        "from kernel_build.torch_install import find_torch\n"
        "print(find_torch().version, 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [torch.__version__, "False"]


@pytest.mark.parametrize("inherits", [False, True])
def test_an_environment_sees_its_base_s_torch_only_if_it_inherits(
    root: Path, tmp_path: Path, inherits: bool
) -> None:
    venv.create(tmp_path / "venv", system_site_packages=inherits, symlinks=True)
    code = (
        f"import sys; sys.path.insert(0, {str(root / 'scripts')!r})\n"
        "from kernel_build.torch_install import site_directories\n"
        "print([name for name, path in site_directories()])"
    )
    output = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "this environment" in output
    assert ("the base environment" in output) == inherits


@pytest.mark.parametrize(
    ("version", "release"), [("2.13.0+cpu", (2, 13)), ("2.11.0a0+git12", (2, 11)), ("3.0", (3, 0))]
)
def test_release_of_a_version(version: str, release: tuple[int, int]) -> None:
    assert torch_release(version) == release


def test_the_kind_of_a_torch(fake_torch, tmp_path: Path) -> None:
    cpu = read_torch(fake_torch("2.13.0+cpu"), "here")
    assert cpu is not None
    assert cpu.kind == "CPU"
    assert str(cpu).startswith("torch 2.13.0+cpu (CPU) from here: ")
    assert read_torch(tmp_path / "nothing", "here") is None
