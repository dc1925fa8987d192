"""What importing pagedinfer brings along, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_the_import_is_free_of_torch_and_configures_no_logging() -> None:
    code = """
import logging, sys, time
started = time.perf_counter()
import pagedinfer
from pagedinfer import SamplingParams, RequestOutput, EngineConfig, OutOfMemoryError
seconds = time.perf_counter() - started
assert not {"torch", "transformers", "numpy", "tqdm"} & sys.modules.keys(), sys.modules.keys()
assert not logging.getLogger().handlers and not logging.getLogger("pagedinfer").handlers
print(seconds)
"""
    assert float(run(code)) < 0.3


def test_every_exported_name_is_there() -> None:
    print(run("import pagedinfer; print([getattr(pagedinfer, name) for name in pagedinfer.__all__])"))
    run("from pagedinfer import *; LLM, LLMEngine, SamplingParams")


def test_an_unknown_name_is_an_attribute_error() -> None:
    run(
        """
import pagedinfer
try:
    pagedinfer.Foo
except AttributeError as error:
    assert "Foo" in str(error)
else:
    raise SystemExit("no error")
"""
    )


def test_modules_of_the_scheduler_s_side_do_not_import_torch() -> None:
    run(
        """
import sys
from pagedinfer import config, errors, outputs, sampling_params
from pagedinfer.engine import batch, input_processor, kv_cache_manager, request, scheduler, seeds
assert "torch" not in sys.modules
"""
    )
