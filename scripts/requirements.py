"""Prints requirements of pyproject.toml, one a line: `python scripts/requirements.py build runtime test`.

A group is "build" (what the build itself needs), "runtime", or an extra. torch is left out: the Makefile
installs the one that its TORCH variable names.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def requirements(pyproject: dict, groups: list[str]) -> list[str]:
    """The requirements of these groups, in order, each once."""
    project = pyproject["project"]
    known = {
        "build": pyproject["build-system"]["requires"],
        "runtime": project["dependencies"],
        **project["optional-dependencies"],
    }
    lines = [line for group in groups for line in known[group]]
    return [line for line in dict.fromkeys(lines) if re.match(r"[\w.-]+", line)[0] != "torch"]


if __name__ == "__main__":
    with open(Path(__file__).parent.parent / "pyproject.toml", "rb") as file:
        print("\n".join(requirements(tomllib.load(file), sys.argv[1:])))
