"""Keeps Python's garbage collector from walking through what stays: torch, transformers, a tokenizer.

A full collection looks at every object that there is, a few hundred thousand after those imports, and so
takes tens of milliseconds, in the middle of a step.
"""

from __future__ import annotations

import gc
import threading
import weakref

_lock = threading.RLock()  # a collection under it may end another of these
_num_frozen = 0


class FrozenGarbage:
    """Collects what is garbage now, and has later collections pass over all else until it is released.

    That holds for the application's objects too: those alive now are still freed when nobody refers to them,
    but cycles among them only once the last of these has been released, or has itself been freed.
    """

    def __init__(self) -> None:
        global _num_frozen
        with _lock:
            _num_frozen += 1
            gc.collect()
            gc.freeze()
        self.release = weakref.finalize(self, _release)
        """Ends it; harmless when repeated."""


def _release() -> None:
    global _num_frozen
    with _lock:
        _num_frozen -= 1
        if _num_frozen == 0:
            gc.unfreeze()
