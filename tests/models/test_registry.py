from __future__ import annotations

import importlib.util
from importlib import import_module
from pathlib import Path

import pytest

from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.registry import FAMILIES, find_family

SCRIPT = Path(__file__).parents[2] / "scripts" / "model_table.py"


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_architecture_has_its_class(architecture: str) -> None:
    module = import_module(f"pagedinfer.models.{FAMILIES[architecture].module}")
    assert issubclass(getattr(module, architecture), CausalLM)


def test_an_unknown_one_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'T5Model' is not supported; supported are") as error:
        find_family("T5Model")
    for architecture in FAMILIES:
        assert architecture in str(error.value)


def test_the_documented_table_is_current() -> None:
    specification = importlib.util.spec_from_file_location("model_table", SCRIPT)
    assert specification is not None
    assert specification.loader is not None
    script = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert script.page_with(script.table()) == page, "run python scripts/model_table.py"
    assert all(f"| `{architecture}` |" in page for architecture in FAMILIES)
