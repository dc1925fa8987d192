"""CPU memory that a GPU's copy engines read and write by themselves."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pagedinfer.errors import OutOfMemoryError
from pagedinfer.runner.memory import cpu_memory, describe_bytes


class PinnedMemory:
    """Holds a CPU tensor's memory pinned, page-locked for CUDA, until it is released or collected.

    torch's own pinned allocator rounds up to a power of two; a swap space of 33 GiB would take 64.

    Raises:
        OutOfMemoryError: the system does not let so much be locked.
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor.zero_()  # by all threads, which is faster than letting the driver touch each page
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(status) != 0:
            memory = cpu_memory()
            raise OutOfMemoryError(
                f"{describe_bytes(tensor.nbytes)} of CPU memory could not be pinned (CUDA error "
                f"{int(status)}); of {describe_bytes(memory.total)} in total, {describe_bytes(memory.free)} "
                f"are free. Lower swap_space"
            )
        self.release = weakref.finalize(self, _unregister, tensor)
        """Gives the lock back; call it when no copy is under way. Harmless when repeated."""


def _unregister(tensor: Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())  # type: ignore[no-untyped-call]
