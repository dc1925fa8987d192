"""Engines that start on one GPU do so one after another.

What an engine takes of a GPU's memory, beyond what torch's allocator knows of, is what has gone while it
starts. If another one starts meanwhile, what that takes counts too, and neither finds room for its cache.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from pagedinfer.logging import get_logger

logger = get_logger(__name__)


@contextmanager
def turn_to_start(device: torch.device) -> Iterator[None]:
    """Waits until no other engine is starting on this GPU, and has others wait; on a CPU does nothing.

    Processes that share no folder for temporary files, as those of two containers, do not see each other.
    """
    if device.type != "cuda":
        yield
        return
    with _only_one(str(torch.cuda.get_device_properties(device).uuid)):
        yield


@contextmanager
def _only_one(name: str) -> Iterator[None]:
    """Lets one at a time of those in who come with this name, from any thread or process of this machine."""
    descriptor = _open(Path(tempfile.gettempdir()) / f"pagedinfer-{name}.lock")
    if descriptor is None:
        yield
        return
    try:
        with suppress(OSError):  # a file system without locks
            _lock(descriptor)
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process forked meanwhile holds the file, too
        os.close(descriptor)


def _lock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        logger.info("another engine is starting on this GPU; waiting until it has")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _open(path: Path) -> int | None:
    """A descriptor of a file that is there from now on, whoever made it; None where none can be."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # nor wait for a writer, should it be a pipe
    with suppress(OSError):  # some systems let nobody "create" what somebody else has
        return os.open(path, flags)
    with suppress(OSError):
        descriptor = os.open(path, flags | os.O_CREAT, 0o644)
        with suppress(OSError):
            os.fchmod(descriptor, 0o644)  # for other users too, whatever the umask
        return descriptor
    return None
