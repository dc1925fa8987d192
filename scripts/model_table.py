"""Writes the table of supported models in docs/models.md, from the registry and the parity tests.

    python scripts/model_table.py            # after a change of either; tests say when it is due

Run from the repository's root, with pagedinfer and what its tests need installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- table: written by scripts/model_table.py -->\n", "<!-- end of table -->\n"


def table() -> str:
    """One row an architecture, with the parity cases that hold it."""
    from pagedinfer.models.gguf_config import GGUF_ARCHITECTURES
    from pagedinfer.models.registry import FAMILIES
    from tests.models.families import CASES, architecture_of

    cases: dict[str, list[str]] = {architecture: [] for architecture in FAMILIES}
    for name, (config_class, _) in CASES.items():
        cases[architecture_of(config_class)].append(name)
    rows = [
        "| Architecture | Models | What is peculiar to it | GGUF | Parity cases |",
        "| --- | --- | --- | --- | --- |",
    ]
    for architecture, family in sorted(FAMILIES.items()):
        gguf = "yes" if architecture in GGUF_ARCHITECTURES.values() else ""
        held = "; ".join(cases[architecture])
        rows.append(f"| `{architecture}` | {family.models} | {family.peculiar} | {gguf} | {held} |")
    return "\n".join(rows) + "\n"


def page_with(rows: str) -> str:
    """The page, with these rows in the place of those that it has."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + rows + END + after


if __name__ == "__main__":
    PAGE.write_text(page_with(table()), encoding="utf-8")
