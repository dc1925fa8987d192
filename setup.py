"""Lets pip build the compiled modules through CMake; all that is declared stands in pyproject.toml."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from setuptools import Extension, __version__, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info

SOURCE = Path(__file__).resolve().parent
sys.path.insert(0, str(SOURCE / "scripts"))

from kernel_build import cmake_build  # noqa: E402
from kernel_build.errors import BuildError  # noqa: E402
from kernel_build.toolchain import INSTALL_REQUIREMENTS  # noqa: E402
from kernel_build.torch_install import find_torch  # noqa: E402

if int(__version__.split(".")[0]) < 77:  # An older one does not understand pyproject.toml.
    sys.exit(
        f"pagedinfer: error: setuptools >= 77 is needed, and this is {__version__}: {INSTALL_REQUIREMENTS}"
    )


class CheckedDistInfo(dist_info):
    """Looks for torch before pip resolves dependencies: it would fetch gigabytes and then fail to build."""

    def run(self) -> None:
        try:
            find_torch()
        except BuildError as error:
            sys.exit(f"pagedinfer: error: {error}")
        super().run()


class CleanBuild(build):
    """Starts a wheel from an empty folder: setuptools would pack modules that are long deleted."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds `_kernels.so` and `_core` and puts them into the package."""

    def run(self) -> None:
        try:
            modules = cmake_build.build(SOURCE, cmake_build.find_settings())
        except BuildError as error:
            sys.exit(f"pagedinfer: error: {error}")
        cmake_build.copy_modules(modules, self._package_folder())

    def get_outputs(self) -> list[str]:
        return [str(Path(self.build_lib) / "pagedinfer" / name) for name in cmake_build.MODULES]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        return {output: str(SOURCE / "pagedinfer" / Path(output).name) for output in self.get_outputs()}

    def _package_folder(self) -> Path:
        return (SOURCE if self.inplace else Path(self.build_lib)) / "pagedinfer"


setup(
    # Names one compiled module, so that the wheel is tagged with its Python and its platform.
    ext_modules=[Extension("pagedinfer._core", sources=[])],
    cmdclass={"dist_info": CheckedDistInfo, "build": CleanBuild, "build_ext": CMakeBuild},
)
