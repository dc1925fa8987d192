"""Who wants to know what an engine does: metrics, logs."""

from __future__ import annotations

from pagedinfer.server import messages as wire
from pagedinfer.server.request_stream import RequestStream


class EngineObserver:
    """Told of everything, does nothing; subclasses do."""

    def started(self, limits: wire.EngineLimits) -> None:
        """The engine can be given requests."""

    def refused(self) -> None:
        """A request found the queue full."""

    def added(self, stream: RequestStream) -> None:
        """A request was given to the engine."""

    def tokens(self, stream: RequestStream, count: int, now: float) -> None:
        """So many tokens of a request have come, at a time of the monotonic clock."""

    def finished(self, stream: RequestStream) -> None:
        """A request has ended, in whatever way."""

    def step(self, outputs: wire.Outputs) -> None:
        """A step is over, or the engine has become idle."""

    def died(self) -> None:
        """The engine's process has ended, and with it all requests."""
