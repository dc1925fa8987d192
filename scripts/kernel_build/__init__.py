"""Builds the compiled modules of pagedinfer: finds torch and the tools, then drives CMake and ninja.

`setup.py` uses this for pip, `scripts/build_kernels.py` for make. Nothing here imports torch.
"""
