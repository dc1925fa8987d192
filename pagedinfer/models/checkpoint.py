"""The files of a checkpoint, of any format, and the tensors in them."""

from __future__ import annotations

import json
import pickle
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagedinfer.errors import WeightsError
from pagedinfer.models.file_names import read_index, weight_file
from pagedinfer.models.gguf_config import gguf_parts, is_gguf


@dataclass(frozen=True, slots=True)
class FilePlace:
    """Where a mapped tensor's bytes lie, for whom reading is faster than touching page after page."""

    descriptor: int
    offset: int
    """Of the tensor's first byte in the file."""
    address: int
    """And in memory."""

    def of(self, part: Tensor) -> int:
        """The offset in the file at which a part of the tensor begins."""
        return self.offset + part.data_ptr() - self.address


class OpenFile(ABC):
    """A file whose tensors can be had by name."""

    @abstractmethod
    def names(self) -> list[str]:
        """Of all tensors in the file, in the order in which they lie there where that is known."""

    @abstractmethod
    def get(self, name: str) -> Tensor:
        """On the CPU, as the file has it: mapped where the format allows it, so that nothing is read yet."""

    def place(self, name: str, tensor: Tensor) -> FilePlace | None:
        """Where the file has the bytes of a tensor that `get` gave; None if it has others."""
        return None


class CheckpointFile:
    """One file; `listed` are the tensors that the index takes from it, None all that it holds."""

    def __init__(self, path: Path, listed: set[str] | None = None) -> None:
        self.path = path
        self.listed = listed

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        """Opens it for as long as the context lasts, and its tensors are used no longer than that.

        Raises:
            WeightsError: it is damaged, or holds something else than tensors.
        """
        raise NotImplementedError
        yield

    def names(self) -> list[str]:
        """Of the tensors to take from it, in the order in which they are read best.

        Raises:
            WeightsError: it lacks one that is listed.
        """
        with self.open() as opened:
            held = opened.names()
        if self.listed is None:
            return held
        absent = sorted(self.listed.difference(held))
        if absent:
            raise WeightsError(f"{self.path} lacks tensors that the index lists for it: {shorten(absent)}")
        return [name for name in held if name in self.listed]


class SafetensorsFile(CheckpointFile):
    """Mapped; the library checks the header and the length."""

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        try:
            opened = safe_open(self.path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.path} is not a whole safetensors file: {error}") from None
        with opened as tensors, open(self.path, "rb") as content:
            yield _OpenSafetensors(tensors, content)


class _OpenSafetensors(OpenFile):
    def __init__(self, tensors: Any, content: BinaryIO) -> None:
        self._tensors = tensors
        self._descriptor = content.fileno()
        # The format, whose header safe_open has checked: its length in 8 bytes, JSON, then the tensors.
        length = int.from_bytes(content.read(8), "little")
        self._header = json.loads(content.read(length))
        self._begin = 8 + length

    def names(self) -> list[str]:
        return list(self._tensors.offset_keys())

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors.get_tensor(name)
        return tensor

    def place(self, name: str, tensor: Tensor) -> FilePlace:
        offset = self._begin + self._header[name]["data_offsets"][0]
        return FilePlace(self._descriptor, offset, tensor.data_ptr())


class TorchFile(CheckpointFile):
    """What torch.save wrote: a pickle, read by the reader that builds tensors and runs nothing."""

    @contextmanager
    def open(self) -> Iterator[OpenFile]:
        yield _OpenMapping(self.path, self._load())

    def _load(self) -> Any:
        try:
            # Files from before torch 1.6 are not zip archives and cannot be mapped.
            mapped = zipfile.is_zipfile(self.path)
            return torch.load(self.path, map_location="cpu", weights_only=True, mmap=mapped)
        except pickle.UnpicklingError as error:
            _refuse_pickle(self.path, error)
        except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise WeightsError(f"{self.path} is not a whole file of torch.save: {reason}") from None


def _refuse_pickle(path: Path, error: Exception) -> NoReturn:
    if path.stat().st_size == 0 or "Weights only load failed" not in str(error):
        raise WeightsError(f"{path} is not a whole file of torch.save: {error}") from None
    raise WeightsError(
        f"{path} holds more than tensors, and reading that could run code of somebody else's; it is refused. "
        f"Use the checkpoint's safetensors, or convert it where you trust it"
    ) from None


class _OpenMapping(OpenFile):
    def __init__(self, path: Path, content: Any) -> None:
        if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
            raise WeightsError(f"{path} must hold a dict of tensors, got {type(content).__name__}")
        for name, tensor in content.items():
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                kind = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                raise WeightsError(f"{name} in {path} must be a dense tensor, got {kind}")
        self._content = content

    def names(self) -> list[str]:
        return list(self._content)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._content[name]
        return tensor


def find_files(path: Path, load_format: str = "auto") -> list[CheckpointFile]:
    """The files of a checkpoint to read: those that its index lists, or the single one without an index.

    Args:
        path: the checkpoint's folder, or a GGUF file.
        load_format: one of config.LOAD_FORMATS, except "dummy".

    Raises:
        WeightsError: there are none of that format, the index is damaged, or lists files that are not there.
    """
    if is_gguf(path):
        if load_format not in ("auto", "gguf"):
            raise WeightsError(f"{path} is a GGUF file, and load_format={load_format!r} was asked for")
        return _gguf_files(path)
    if load_format == "gguf":
        raise WeightsError(
            f'load_format="gguf" needs the path of a .gguf file as the model, got {str(path)!r}'
        )
    try:
        first = weight_file(load_format, lambda name: (path / name).exists(), repr(str(path)))
        files = read_index(path / first.name) if first.is_index else {first.name: None}
    except ValueError as error:
        raise WeightsError(str(error)) from None
    _check_listed(path / first.name, files)
    kind = SafetensorsFile if first.kind == "safetensors" else TorchFile
    return [kind(path / name, listed) for name, listed in files.items()]


def _gguf_files(path: Path) -> list[CheckpointFile]:
    from pagedinfer.models.gguf_file import GGUFFile, GGUFLayout

    parts = gguf_parts(path)
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise WeightsError(
            f"{path} is one of {len(parts)} files, and some are not there: {', '.join(missing)}"
        )
    try:
        layout = GGUFLayout.read(parts[0])
    except ValueError as error:
        raise WeightsError(str(error)) from None
    return [GGUFFile(part, layout) for part in parts]


def _check_listed(index: Path, files: Iterable[str]) -> None:
    """Raises WeightsError unless all are files beside the index."""
    for file in files:
        if Path(file).name != file:
            raise WeightsError(f"{index} lists {file!r}, which is not the name of a file beside it")
    missing = [file for file in files if not (index.parent / file).exists()]
    if missing:
        raise WeightsError(f"{index} lists files that are not there: {', '.join(sorted(missing))}")


def shorten(names: list[str], at_most: int = 10) -> str:
    """A list of names for a message, cut short."""
    shown = ", ".join(names[:at_most])
    return shown if len(names) <= at_most else f"{shown} and {len(names) - at_most} more"
