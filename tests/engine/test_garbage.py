"""What is alive when an engine is ready is not looked at by garbage collections until it is closed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from pagedinfer import LLM
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS: dict[str, Any] = {"device": "cpu", "num_gpu_blocks_override": 8, "max_model_len": 64}


class Cycle:
    def __init__(self) -> None:
        self.me = self


def test_frozen_while_an_engine_is_open(tiny_llama: TinyModel) -> None:
    before = gc.get_freeze_count()
    old = Cycle()
    died = weakref.ref(old)
    first = LLM(tiny_llama.path, **OPTIONS)
    second = LLM(tiny_llama.path, **OPTIONS)
    assert gc.get_freeze_count() > before + 1000
    first.close()
    del old
    young = Cycle()
    young_died = weakref.ref(young)
    del young
    gc.collect()
    assert young_died() is None  # what came later is collected as ever
    assert died() is not None
    second.close()
    second.close()
    gc.collect()
    assert died() is None
    assert gc.get_freeze_count() == before


def test_an_engine_that_is_dropped_or_fails_lets_go(tiny_llama: TinyModel) -> None:
    before = gc.get_freeze_count()
    llm = LLM(tiny_llama.path, **OPTIONS)
    model = weakref.ref(llm.llm_engine.worker)
    del llm
    assert model() is None
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(tiny_llama.path, **OPTIONS | {"max_model_len": 100_000})
    assert gc.get_freeze_count() == before
