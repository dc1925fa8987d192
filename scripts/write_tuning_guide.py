"""Writes docs/tuning.md from the rules of `pagedinfer.engine.advice`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pagedinfer.engine.advice import guide  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "tuning.md").write_text(guide(), encoding="utf-8")
