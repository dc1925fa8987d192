"""The way of weights to a device: what is read from files, and that each byte lands where it should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedinfer.models import upload as module
from pagedinfer.models.checkpoint import SafetensorsFile
from pagedinfer.models.upload import Uploader, _read

SHAPES = {"a": (300, 70), "b": (7,), "c": (), "d": (5, 3, 11), "empty": (0, 4), "wide": (2, 3000)}


@pytest.fixture
def file(tmp_path: Path) -> SafetensorsFile:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    tensors["half"] = tensors["a"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")
    return SafetensorsFile(tmp_path / "model.safetensors")


def test_place_is_where_the_bytes_are(file: SafetensorsFile) -> None:
    content = file.path.read_bytes()
    with file.open() as tensors:
        for name in tensors.names():
            tensor = tensors.get(name)
            place = tensors.place(name, tensor)
            assert place is not None
            expected = tensor.flatten().view(torch.uint8).numpy().tobytes()
            assert content[place.offset : place.offset + tensor.nbytes] == expected
        tensor = tensors.get("a")
        place = tensors.place("a", tensor)
        assert place is not None
        memory = torch.empty(tensor[100:103].nbytes, dtype=torch.uint8)
        _read(place.descriptor, place.of(tensor[100:103]), memory)
        assert torch.equal(memory.view(torch.float32).view(3, 70), tensor[100:103])


def test_destinations_of_inference_mode(device: torch.device, file: SafetensorsFile) -> None:
    with torch.inference_mode(), file.open() as tensors:
        target = torch.empty(SHAPES["a"], device=device)
        with Uploader(device) as uploader:
            uploader.copy(tensors.get("a"), target)
        assert torch.equal(target.cpu(), tensors.get("a"))


def test_reading_past_the_end_is_an_error(file: SafetensorsFile) -> None:
    size = file.path.stat().st_size
    memory = torch.empty(16, dtype=torch.uint8)
    with open(file.path, "rb") as content, pytest.raises(OSError, match="ends 10 bytes too early"):
        _read(content.fileno(), size - 6, memory)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_tensor_arrives(
    device: torch.device,
    file: SafetensorsFile,
    mapped: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In pieces of 1 KiB, of whole rows and of rows that are larger, into views that have gaps or not."""
    monkeypatch.setattr(module, "_STAGE_BYTES", 1024)
    expected = load_file(file.path)
    targets = {}
    with file.open() as tensors, Uploader(device) as uploader:
        for name, tensor in expected.items():
            transposed = tensor.dim() == 2 and name != "wide"
            memory = torch.full(
                tensor.mT.shape if transposed else tensor.shape, -1.0, dtype=dtype, device=device
            )
            targets[name] = memory.mT if transposed else memory
            source = tensors.get(name)
            uploader.copy(source, targets[name], tensors.place(name, source) if mapped else None)
        uploader.finish()
    for name, tensor in expected.items():
        assert torch.equal(targets[name].cpu(), tensor.to(dtype)), name
