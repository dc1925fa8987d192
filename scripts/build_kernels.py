"""Builds the compiled modules into the source tree: `python scripts/build_kernels.py`.

The same build as `pip install -e .`, without pip: a second after changing nothing, a few after changing one
file. The environment variables that steer it are in CONTRIBUTING.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kernel_build.cmake_build import build, copy_modules, find_settings
from kernel_build.errors import BuildError


def main() -> int:
    """Builds; returns the exit status."""
    source = Path(__file__).resolve().parent.parent
    try:
        copy_modules(build(source, find_settings()), source / "pagedinfer")
    except BuildError as error:
        print(f"pagedinfer: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
