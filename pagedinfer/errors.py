"""Errors of pagedinfer that are more than a ValueError."""

from __future__ import annotations


class PagedinferError(Exception):
    """Base of all errors below."""


class RequestTooLargeError(PagedinferError):
    """A well-formed request that can never fit: its context or its KV cache would be too small."""


class OutOfMemoryError(PagedinferError):
    """The device has too little memory for what was asked; the message gives wanted, free and total."""


class WeightsError(PagedinferError):
    """A checkpoint that does not fit its model: names missing, unexpected, or of another shape."""


class DeviceError(PagedinferError):
    """The device that was asked for cannot be used; the message says why, with both sides' versions."""


class DownloadError(PagedinferError):
    """A model that cannot be fetched from the hub; the message says what to do."""


class EngineStartError(PagedinferError):
    """The engine's process could not start; the message is the engine's own."""


class EngineDeadError(PagedinferError):
    """The engine's process has ended, or a rank of it died or hung; it will serve no more requests."""


class RequestFailedError(PagedinferError):
    """The engine failed while it worked on a request; others may still be served."""


class QueueFullError(PagedinferError):
    """As many requests wait as may; later there will be room again."""
