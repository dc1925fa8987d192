"""Makes scripts/ importable, as setup.py does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))


@pytest.fixture
def root() -> Path:
    """The source tree."""
    return ROOT


@pytest.fixture
def fake_torch(tmp_path: Path):
    """Makes a folder that looks like an installed torch of some version."""

    def make(version: str, cuda: str | None = None, where: Path = tmp_path, headers: bool = True) -> Path:
        torch = where / "torch"
        torch.mkdir(parents=True)
        (torch / "__init__.py").write_text("raise ImportError('nobody may import torch here')\n")
        (torch / "version.py").write_text(
            "from typing import Optional\n"
            f"__version__ = '{version}'\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
            "git_version = 'abc'\nhip: Optional[str] = None\n"
        )
        if headers:
            header = torch / "include/torch/csrc/stable/library.h"
            header.parent.mkdir(parents=True)
            header.touch()
        return torch

    return make
