"""GPU memory that other processes of the machine can read and write, through CUDA's driver."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1
_NATIVE_ATOMICS = 3  # an attribute of two GPUs


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class PeerMemory:
    """A piece of this process's memory on a GPU, zeroed, and those of others that they have told it of.

    Args:
        num_bytes: of each piece.
        device: this process's GPU.

    Raises:
        RuntimeError: the driver refuses; the message has its error.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)  # so that the device's context is this thread's
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"CUDA's driver cannot be loaded: {error}") from None
        own = ctypes.c_uint64()
        self._num_bytes = num_bytes
        self._call("cuMemAlloc_v2", ctypes.byref(own), ctypes.c_size_t(num_bytes))
        self._own = own.value
        self._opened: list[int] = []
        self._call("cuMemsetD8_v2", own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self._call("cuCtxSynchronize")

    def handle(self) -> Tensor:
        """uint8 [HANDLE_BYTES] on the CPU, by which other processes find this one's piece."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self._own))
        return torch.tensor(list(handle.bytes), dtype=torch.uint8)

    def open(self, handles: Sequence[Tensor], rank: int) -> Tensor:
        """int64 [number of handles] on the CPU: the addresses of all pieces; that of `rank` is this one's."""
        addresses = []
        for number, handle in enumerate(handles):
            if number == rank:
                addresses.append(self._own)
                continue
            theirs = ctypes.c_uint64()
            contents = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle.tolist()))
            flags = ctypes.c_uint(_ENABLE_PEER_ACCESS)
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(theirs), contents, flags)
            self._opened.append(theirs.value)
            addresses.append(theirs.value)
        return torch.tensor(addresses, dtype=torch.int64)

    def fill(self, word: int) -> None:
        """Sets all words of 4 bytes of this process's piece."""
        count = ctypes.c_size_t(self._num_bytes // 4)
        self._call("cuMemsetD32_v2", ctypes.c_uint64(self._own), ctypes.c_uint(word), count)

    def are_linked(self, devices: Sequence[int]) -> bool:
        """Whether GPUs are joined by NVLink rather than by PCIe, which has no atomics on a peer's memory."""
        value = ctypes.c_int()
        for one, other in itertools.permutations(devices, 2):
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(value), _NATIVE_ATOMICS, one, other)
            if not value.value:
                return False
        return True

    def close(self) -> None:
        """Gives it back; nothing may be using it any more, here or elsewhere."""
        for address in self._opened:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))
        self._opened.clear()
        if self._own:
            self._call("cuMemFree_v2", ctypes.c_uint64(self._own))
            self._own = 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code != 0:
            message = ctypes.c_char_p()
            self._driver.cuGetErrorString(code, ctypes.byref(message))
            reason = (message.value or b"unknown error").decode()
            raise RuntimeError(f"{name}: {reason} (CUDA error {code})")
