"""Tries an installed wheel; run by build_wheels.py under each Python, outside the source tree.

    python -I wheel_smoke_test.py TORCH_DIR

With torch: an op gives the right numbers. Without torch for this Python: everything that needs none is
imported, and the kernels are loaded into the process beside the libraries of the torch in TORCH_DIR, which
shows that they need nothing of a Python.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def main(torch_directory: Path) -> str:
    """Returns what was tried; an exception says what is wrong."""
    import pagedinfer
    from pagedinfer import SamplingParams, _core
    from pagedinfer.engine import scheduler  # noqa: F401

    package = Path(pagedinfer.__file__).parent
    assert package.is_relative_to(sys.prefix), f"not the wheel's: {package}"
    assert importlib.metadata.version("pagedinfer") == pagedinfer.__version__
    assert (package / "py.typed").exists()
    assert "torch" not in sys.modules
    assert SamplingParams(max_tokens=3).max_tokens == 3
    assert _core.__doc__

    if importlib.util.find_spec("torch") is None:
        for name in ("libtorch.so", "libtorch_cpu.so", "libc10.so"):
            ctypes.CDLL(str(torch_directory / "lib" / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(package / "_kernels.so"))
        return "no torch for this Python here: imported, _core and _kernels.so loaded, no op run"

    import torch

    from pagedinfer import ops

    x = torch.randn(3, 64)
    expected = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
    torch.testing.assert_close(ops.silu_and_mul(x), expected)
    return f"imported, _core and _kernels.so loaded, an op run under torch {torch.__version__}"


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
