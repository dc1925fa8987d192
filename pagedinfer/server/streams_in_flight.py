"""The unfinished requests of an engine, as the process that has their texts knows them."""

from __future__ import annotations

from collections.abc import Iterator

from pagedinfer.server.request_stream import RequestStream


class StreamsInFlight:
    """Streams by their ids, and by the numbers of their choices; a request's own is that of its first one."""

    def __init__(self) -> None:
        self._by_id: dict[str, RequestStream] = {}
        self._by_choice: dict[int, RequestStream] = {}
        self.with_choice = self._by_choice.get
        """The stream that this is a choice of; None: it has ended."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[RequestStream]:
        """Over those there are now, whatever is removed meanwhile."""
        return iter(list(self._by_id.values()))

    def with_id(self, request_id: str) -> RequestStream | None:
        return self._by_id.get(request_id)

    def add(self, stream: RequestStream) -> None:
        self._by_id[stream.request.request_id] = stream
        self._by_choice.update(dict.fromkeys(stream.choice_numbers, stream))

    def remove(self, stream: RequestStream) -> bool:
        """False: it is not there (any more), though another one of its id may be."""
        if stream.number not in self._by_choice:
            return False
        del self._by_id[stream.request.request_id]
        for number in stream.choice_numbers:
            del self._by_choice[number]
        return True
