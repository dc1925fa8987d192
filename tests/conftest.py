"""Shared by all tests: the device parameter, and skipping what needs a GPU where there is none."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TinyModel(NamedTuple):
    """A random model on disk, and transformers' own of it."""

    path: str
    reference: PreTrainedModel


def pytest_configure() -> None:
    """Ctrl-C works, also where a shell runs the tests in the background: all they start would ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each test that takes this runs on the CPU and, where there is one, on the GPU."""
    return torch.device(request.param)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """A random Llama of 2 layers, 320 tokens and a context of 512, with a byte-level tokenizer."""
    from tests.tiny_models import make_llama

    path = tmp_path_factory.mktemp("tiny_llama")
    return TinyModel(str(path), make_llama(path))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For tiny models, which gain nothing from several threads and on a busy machine lose a lot."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
