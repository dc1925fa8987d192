"""The thread in a rank that answers the engine's questions while the main thread is at work, or hangs."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

from pagedinfer.distributed.channel import Channel, Kind
from pagedinfer.distributed.messages import Status, encode
from pagedinfer.distributed.torch_group import TorchGroup

_SECONDS_TO_END = 5.0


class RankMonitor:
    """Answers pings with how far the main thread is. Ends the process if the engine is gone and that is not.

    Must be made by the main thread.
    """

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._main_thread = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._main_thread)
        self._step = -1
        self._in_step = False
        self.group: TorchGroup | None = None
        """Set once there is one."""
        threading.Thread(target=self._run, name="monitor", daemon=True).start()

    def begin_step(self, step: int) -> None:
        """The main thread has been given a step."""
        self._step = step
        self._in_step = True

    def end_step(self) -> None:
        """It waits for the next."""
        self._in_step = False

    def _run(self) -> None:
        try:
            while True:
                kind, _ = self._control.receive()
                if kind == Kind.PING:
                    self._control.send(Kind.STATUS, encode(self._status()))
        except (EOFError, OSError):
            time.sleep(_SECONDS_TO_END)  # what the main thread has for an orderly end
            os._exit(1)

    def _status(self) -> Status:
        frame = sys._current_frames().get(self._main_thread)
        return Status(
            step=self._step,
            in_step=self._in_step,
            num_collectives=0 if self.group is None else self.group.num_collectives,
            cpu_seconds=time.clock_gettime(self._clock),
            traceback="" if frame is None else "".join(traceback.format_stack(frame)),
        )
