"""What is in the wheel. It is built from the modules of the latest build; nothing is compiled here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import pagedinfer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built() -> None:
    """Skips where a wheel would compile everything."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from kernel_build.cmake_build import find_settings
    from kernel_build.errors import BuildError

    try:
        key = find_settings().key
    except BuildError as error:
        pytest.skip(str(error))
    if not (ROOT / "build" / key / "modules/_kernels.so").exists():
        pytest.skip("needs `make build` first: this would compile everything")


@pytest.fixture(scope="module")
def wheel(built: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    result = subprocess.run(
        [*command, "--wheel-dir", str(target), str(ROOT)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = target.glob("*.whl")
    return wheel


def test_the_wheel_is_tagged_with_its_python_and_platform(wheel: Path) -> None:
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name == f"pagedinfer-{pagedinfer.__version__}-{python}-{python}-{platform}.whl"


def test_the_wheel_holds_the_modules_and_every_source_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("pagedinfer/")}
        info = json.loads(archive.read("pagedinfer/_build_info.json"))
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    sources = {
        str(path.relative_to(ROOT))
        for kind in ("*.py", "*.pyi")
        for path in ROOT.glob(f"pagedinfer/**/{kind}")
    }
    modules = {"_kernels.so", f"_core{suffix}", "_build_info.json", "py.typed"}
    assert names == sources | {f"pagedinfer/{name}" for name in modules}
    assert info["torch"]


def test_the_metadata(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
        license_name = name.replace("METADATA", "licenses/LICENSE")
        assert "Apache License" in archive.read(license_name).decode()
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert "License-Expression: Apache-2.0" in metadata


def test_the_modules_name_no_folder_of_this_machine(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith(".so"):
                continue
            content = archive.read(name)
            # A run path would be one of these, ending a string in the dynamic section.
            assert not re.search(rb"/site-packages/torch/lib\0", content), name
            assert str(ROOT / "build").encode() not in content, name


def test_an_editable_install_is_found_from_beside_the_clone(built: None, tmp_path: Path) -> None:
    # `git clone ... pagedinfer`, and a script in the folder where that was said.
    code = f"from setuptools.build_meta import build_editable; build_editable({str(tmp_path)!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "pagedinfer").mkdir()
    script = tmp_path / "script.py"
    script.write_text(
        f"import site; site.addsitedir({str(site)!r})\n"
        "import pagedinfer; print(pagedinfer.__file__); pagedinfer.SamplingParams()\n"
    )
    # -S: without what is installed in this environment.
    result = subprocess.run([sys.executable, "-S", str(script)], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == str(ROOT / "pagedinfer" / "__init__.py"), result.stderr
