"""Builds a wheel into dist/ for each Python 3.11 to 3.14 found, and tries each one: `make wheel`.

    python scripts/build_wheels.py [3.12 ...]

The kernels are compiled once: only _core depends on the Python. A Python for which there is no torch here
is tried as far as that goes; the last lines say how far.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from kernel_build.errors import BuildError, say
from kernel_build.torch_install import TorchInstall, find_torch
from requirements import requirements

SOURCE = Path(__file__).resolve().parent.parent
DIST = SOURCE / "dist"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def find_python(version: str) -> str | None:
    """An interpreter of this version: the one that runs this, one on PATH, or one of pyenv's."""
    candidates = [sys.executable] if version == OWN_VERSION else []
    candidates.append(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    candidates += [str(path / "bin/python") for path in sorted(pyenv.glob(f"{version}.*"), reverse=True)]
    for candidate in candidates:
        try:
            command = [candidate, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        except (OSError, subprocess.CalledProcessError):
            continue
        if answer.strip() == version:
            return candidate
    return None


def build_and_try(python: str, version: str, torch: TorchInstall, scratch: Path) -> str:
    """Builds the wheel of one Python and tries it in an environment of its own; returns what was tried.

    Raises:
        subprocess.CalledProcessError: a step failed; its output has been shown.
    """
    venv = scratch / version
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    environment = {**os.environ, "PAGEDINFER_TORCH_DIR": str(torch.directory)}
    wheels = scratch / f"wheel-{version}"
    subprocess.run(
        [*pip, "wheel", "-q", "--no-deps", "--wheel-dir", str(wheels), str(SOURCE)],
        check=True,
        env=environment,
    )
    (wheel,) = wheels.iterdir()
    DIST.mkdir(exist_ok=True)
    wheel = wheel.replace(DIST / wheel.name)
    subprocess.run([*pip, "install", "-q", "--no-deps", str(wheel)], check=True)
    if version == OWN_VERSION:
        # Lends this environment's torch and the rest, instead of installing them a second time.
        site_packages = venv / f"lib/python{version}/site-packages"
        (site_packages / "lent.pth").write_text(f"{torch.directory.parent}\n")
    else:
        with open(SOURCE / "pyproject.toml", "rb") as file:
            others = requirements(tomllib.load(file), ["runtime"])
        subprocess.run([*pip, "install", "-q", *others], check=True)
    smoke_test = [str(venv / "bin/python"), "-I", str(SOURCE / "scripts/wheel_smoke_test.py")]
    result = subprocess.run(
        [*smoke_test, str(torch.directory)], cwd=scratch, stdout=subprocess.PIPE, text=True, check=True
    )
    return f"{wheel.relative_to(SOURCE)} ({wheel.stat().st_size / 1e6:.1f} MB): {result.stdout.strip()}"


def main() -> int:
    """Builds all; returns the exit status: 0 if every Python that was found, and asked for, passed."""
    lines, failed = [], False
    try:
        torch = find_torch()
    except BuildError as error:
        print(f"pagedinfer: error: {error}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="pagedinfer-wheels-") as scratch:
        for version in sys.argv[1:] or VERSIONS:
            python = find_python(version)
            if python is None:
                lines.append(f"Python {version}: not on this machine")
                continue
            say(f"building and trying the wheel for Python {version} ({python})")
            try:
                lines.append(f"Python {version}: {build_and_try(python, version, torch, Path(scratch))}")
            except subprocess.CalledProcessError as error:
                failed = True
                lines.append(f"Python {version}: FAILED: {' '.join(map(str, error.cmd))}")
    for line in lines:
        say(line)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
