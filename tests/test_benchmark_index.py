"""benchmarks/README.md lists every script there is."""

from __future__ import annotations

import re
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_script_is_listed() -> None:
    listed = re.findall(r"^\| `(\w+\.py)` \|", (BENCHMARKS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(script.name for script in BENCHMARKS.glob("*.py"))
