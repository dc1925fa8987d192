"""Finds out which rank has died or hangs, while the engine waits for all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector

from pagedinfer.distributed.channel import Channel, Kind, Message
from pagedinfer.distributed.messages import Failure, Status, decode_failure, decode_status
from pagedinfer.distributed.ranks import Rank
from pagedinfer.errors import EngineDeadError

_PING_SECONDS = 1.0
_SILENT_SECONDS = 6.0  # without an answer, of a thread that has nothing else to do
_HANG_SECONDS = 7.0  # all ranks stand still, and one of them in the middle of a step
_WORK_SECONDS = 300.0  # all stand still, but a device or a CPU is at work
_LEAST_WORK = 0.02  # share of a core, of a thread that does anything, on a busy machine, too
_GRACE_SECONDS = 1.0  # the first news may be of a rank that suffered from the death of another


@dataclass(slots=True)
class _Seen:
    """The last that is known of a rank."""

    asked_at: float  # the first ping that it has not answered
    status: Status | None = None
    moved_at: float = 0.0  # when it was last seen to have got on
    worked_at: float = 0.0  # when its main thread was last seen to have used its CPU
    is_asked: bool = False


class RankWatch:
    """Waits for messages of the ranks, and for their ends."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks
        self._selector = DefaultSelector()
        for rank in ranks:
            self._selector.register(rank.data, EVENT_READ, rank)
            self._selector.register(rank.control, EVENT_READ, rank)
        self._failures: dict[int, Failure] = {}
        self._gone: list[Rank] = []
        self._seen: dict[int, _Seen] = {}
        self._last_ping = 0.0

    def begin_wait(self) -> None:
        """A new wait begins: how long the ranks were left alone before does not count."""
        self._seen.clear()
        self._last_ping = time.monotonic()

    def wait(self, last_step: int) -> list[tuple[Rank, Message]]:
        """The data messages that have arrived; waits about a second for one.

        Args:
            last_step: that the ranks were sent, for messages; -1: none yet, and then nothing is a hang, since
                loading a model may take any time.

        Raises:
            EngineDeadError: a rank has ended, or hangs.
        """
        arrived: list[tuple[Rank, Message]] = []
        for key, _ in self._selector.select(_PING_SECONDS):
            self._read(key.data, key.fileobj, arrived)  # type: ignore[arg-type]
        if self._failures or self._gone:
            raise self._death(last_step)
        if not arrived and last_step >= 0 and time.monotonic() - self._last_ping >= _PING_SECONDS:
            self._last_ping = time.monotonic()
            self._check_progress(last_step)
        return arrived

    def why_unreachable(self, rank: Rank, step: int) -> EngineDeadError:
        """The error of an engine that could not send a step to a rank."""
        if rank.how_it_ended() is None and not self._news_arrive():
            return EngineDeadError(
                f"{rank.name} takes no messages, {_describe_step(step)}: its process is stopped or blocked. "
                f"All ranks have been ended"
            )
        return self._death(step)

    def first_cause(self) -> Failure | None:
        """The exception that ended the ranks, if it was one: if possible, not one about a connection."""
        for failure in self._failures.values():
            if not any(word in failure.message for word in ("gloo", "NCCL", "onnection")):
                return failure
        return next(iter(self._failures.values()), None)

    def close(self) -> None:
        """Waits for nothing any more."""
        self._selector.close()

    # ---- ranks that end ----

    def _read(self, rank: Rank, channel: Channel, arrived: list[tuple[Rank, Message]]) -> None:
        try:
            for kind, contents in channel.receive_arrived():
                if kind == Kind.FAILURE:
                    self._failures.setdefault(rank.number, decode_failure(contents))
                elif kind == Kind.STATUS:
                    self._note(rank, decode_status(contents))
                else:
                    arrived.append((rank, (kind, contents)))
        except EOFError:
            self._selector.unregister(channel)
            if rank not in self._gone:
                self._gone.append(rank)

    def _news_arrive(self) -> bool:
        """Reads what ranks say for a second; whether one of them has ended."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while time.monotonic() < deadline and self._selector.get_map():
            for key, _ in self._selector.select(deadline - time.monotonic()):
                self._read(key.data, key.fileobj, [])  # type: ignore[arg-type]
        return bool(self._failures or self._gone)

    def _death(self, last_step: int) -> EngineDeadError:
        self._news_arrive()
        during = _describe_step(last_step)
        for rank in self._gone:
            if rank.number not in self._failures:  # it could not even say why
                how = rank.how_it_ended() or "ended, or its connection did"
                return EngineDeadError(
                    f"{rank.name} {how} {during}; it left no traceback. All ranks have been ended"
                )
        failure = self.first_cause()
        if failure is None:
            return EngineDeadError(f"the connection to a rank ended {during}. All ranks have been ended")
        [rank] = [rank for rank in self._ranks if self._failures.get(rank.number) is failure]
        return EngineDeadError(
            f"{rank.name} failed {during} with {failure.kind}: {failure.message}. All ranks have been ended. "
            f"Its traceback:\n{failure.traceback}"
        )

    # ---- ranks that hang ----

    def _check_progress(self, last_step: int) -> None:
        now = time.monotonic()
        for rank in self._ranks:
            seen = self._seen.setdefault(rank.number, _Seen(now, moved_at=now, worked_at=now))
            if seen.is_asked and now - seen.asked_at > _SILENT_SECONDS:
                raise EngineDeadError(
                    f"{rank.name} has not answered for {now - seen.asked_at:.0f} s, "
                    f"{_describe_step(last_step)}: its process is stopped or blocked. All ranks have been "
                    f"ended{_describe_place(seen.status)}"
                )
            if not seen.is_asked:
                seen.is_asked, seen.asked_at = True, now
                try:
                    rank.control.send(Kind.PING)
                except OSError:
                    continue  # it has ended, which the next wait sees
        if len(self._seen) < len(self._ranks) or any(s.status is None for s in self._seen.values()):
            return
        still = min(now - seen.moved_at for seen in self._seen.values())
        idle = min(now - seen.worked_at for seen in self._seen.values())
        slowest = min(self._ranks, key=lambda rank: _place(self._seen[rank.number].status))
        status = self._seen[slowest.number].status
        assert status is not None
        waits_for_device = not status.in_step and status.step == last_step
        at_rest = not waits_for_device and min(still, idle) > _HANG_SECONDS
        if at_rest or still > _WORK_SECONDS:
            raise EngineDeadError(
                f"{slowest.name} hangs {_describe_step(status.step)}: no rank has got on for {still:.0f} s, "
                f"and this one is the furthest behind. All ranks have been ended{_describe_place(status)}"
            )

    def _note(self, rank: Rank, status: Status) -> None:
        seen = self._seen.get(rank.number)
        if seen is None:
            return  # the answer to a question of an earlier wait
        before = seen.status
        if before is None or _place(before) != _place(status):
            seen.moved_at = time.monotonic()
        if before is None or status.cpu_seconds - before.cpu_seconds > _LEAST_WORK * _PING_SECONDS:
            seen.worked_at = time.monotonic()
        seen.status = status
        seen.is_asked = False


def _place(status: Status | None) -> tuple[int, int, bool]:
    """How far a rank is; what is less is further behind."""
    assert status is not None
    return status.step, status.num_collectives, not status.in_step


def _describe_step(step: int) -> str:
    return "before its first step" if step < 0 else f"in step {step}"


def _describe_place(status: Status | None) -> str:
    return f". It was at\n{status.traceback}" if status is not None and status.traceback else ""
