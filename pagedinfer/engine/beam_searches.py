"""The beam searches of an engine: which of them are under way, and whose update is whose."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from pagedinfer.beam_search import BeamSearchParams
from pagedinfer.engine.batch import AdmittedRequest
from pagedinfer.engine.beam_search import BEAM, BeamSearch
from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.request_update import RequestUpdate
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.outputs import RequestOutput


class BeamSearches:
    """All searches of an engine. So many are under way that each of their beams can have a slot."""

    def __init__(self, scheduler: Scheduler, eos_token_ids: frozenset[int]) -> None:
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._waiting: deque[BeamSearch] = deque()
        self._active: dict[str, BeamSearch] = {}
        self._by_beam: dict[str, BeamSearch] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._active)

    def __contains__(self, request_id: str) -> bool:
        """Whether this is the id of a search, or such as one gives to its beams."""
        names = (request_id, request_id.rpartition(BEAM)[0])
        return any(search.request_id in names for search in (*self._active.values(), *self._waiting))

    def check_new(self, request_id: str) -> None:
        """Raises ValueError if others have ids such as this search would give to its beams."""
        for name in self._scheduler.requests:
            if name.startswith(request_id + BEAM):
                raise ValueError(f"there is an unfinished request {name!r} already")

    def add(
        self, request_id: str, prompt: ProcessedPrompt, params: BeamSearchParams, priority: int = 0
    ) -> None:
        """Queues a search; see `LLMEngine.add_beam_search`."""
        max_num_seqs = self._scheduler.config.max_num_seqs
        if params.beam_width > max_num_seqs:
            raise ValueError(
                f"beam_width must be at most max_num_seqs={max_num_seqs}, got {params.beam_width}; lower it "
                f"or raise max_num_seqs"
            )
        if request_id in self:
            raise ValueError(f"there is an unfinished request {request_id!r} already")
        search = BeamSearch(request_id, prompt, params, self._eos_token_ids, priority, self._scheduler)
        self._waiting.append(search)
        self._start_waiting()

    def _start_waiting(self) -> None:
        num_free = self._scheduler.config.max_num_seqs
        num_free -= sum(search.params.beam_width for search in self._active.values())
        while self._waiting and self._waiting[0].params.beam_width <= num_free:
            search = self._waiting.popleft()
            num_free -= search.params.beam_width
            search.start()
            self._active[search.request_id] = search
            self._by_beam.update(dict.fromkeys(search.requests, search))

    def note_scheduled(self, admitted: Iterable[AdmittedRequest]) -> list[AdmittedRequest]:
        """Keeps the time at which each search was scheduled first; returns those that are no beams."""
        others = []
        for each in admitted:
            search = self._by_beam.get(each.request_id)
            if search is None:
                others.append(each)
            else:
                search.metrics.scheduled_ts = search.metrics.scheduled_ts or time.monotonic()
        return others

    def process(self, updates: list[RequestUpdate]) -> tuple[list[RequestUpdate], list[RequestOutput]]:
        """Goes on with what a step gave: the updates that are not of beams, and the finished searches."""
        if not self._by_beam:
            return updates, []
        others: list[RequestUpdate] = []
        outputs: list[RequestOutput] = []
        # Looked up before anything goes on: a beam may be given up for what another one's update brings.
        for search, update in [(self._by_beam.get(update.request_id), update) for update in updates]:
            if search is None:
                others.append(update)
            elif update.request_id in search.requests:
                self._forget(search.requests)
                search.update(update)
                self._by_beam.update(dict.fromkeys(search.requests, search))
                if search.finished:
                    del self._active[search.request_id]
                    outputs.append(search.output())
        if outputs:
            self._start_waiting()
        return others, outputs

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a search; None if there is none (any more)."""
        search = self._active.pop(request_id, None)
        if search is None:
            search = next((each for each in self._waiting if each.request_id == request_id), None)
            if search is None:
                return None
            self._waiting.remove(search)
        self._forget(search.requests)
        search.stop()
        self._start_waiting()
        return search.output()

    def _forget(self, beams: Iterable[str]) -> None:
        for beam in beams:
            del self._by_beam[beam]

    def drop(self, beams: Iterable[str]) -> list[str]:
        """Ends the searches that have one of these beams; returns their ids. No output tells of them."""
        dropped = {search.request_id: search for beam in beams if (search := self._by_beam.get(beam))}
        for request_id in dropped:
            self.abort(request_id)
        return list(dropped)

    def clear(self) -> list[str]:
        """Forgets all searches; returns their ids."""
        forgotten = [*self._active, *(search.request_id for search in self._waiting)]
        self._waiting.clear()
        self._active.clear()
        self._by_beam.clear()
        return forgotten
