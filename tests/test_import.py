"""What importing pagedinfer brings along, in a fresh interpreter."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pagedinfer

_WAITS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def run(code: str, environment: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=120, env=environment
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


def test_threads_do_not_spin_for_long_unless_told_otherwise() -> None:
    code = "import os, pagedinfer; print(os.environ.get('GOMP_SPINCOUNT'))"
    said = {name: value for name, value in os.environ.items() if name not in _WAITS}
    for told, count in (
        ({}, "10000"),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, "None"),
    ):
        assert run(code, said | told).strip() == count


def test_dir_lists_what_is_exported() -> None:
    assert {name for name in dir(pagedinfer) if not name.startswith("__")} == {
        name for name in pagedinfer.__all__ if not name.startswith("__")
    }


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


def modules_that_say_so() -> list[str]:
    """Those whose docstring says that they are free of torch."""
    root = Path(pagedinfer.__file__).parent
    found = []
    for path in sorted(root.glob("**/*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if re.search("torch-free|no torch here", docstring, re.IGNORECASE):
            inside = path.parent.glob("*.py") if path.stem == "__init__" else [path]
            found += [f"pagedinfer.{'.'.join(p.relative_to(root).with_suffix('').parts)}" for p in inside]
    return found


def test_modules_that_say_so_are_free_of_torch() -> None:
    names = modules_that_say_so()
    assert {"pagedinfer.sampling_params", "pagedinfer.engine.batch", "pagedinfer.planning.plan"} <= {*names}
    run(
        f"""
import sys
from importlib import import_module
for name in {names}:
    import_module(name)
    assert "torch" not in sys.modules, name
"""
    )
