"""Requests that wait for another's KV: the further choices of a prompt that is not computed yet."""

from __future__ import annotations

from pagedinfer.engine.request import Request, RequestStatus


class PendingForks:
    """Children by the parent whose KV they will share. They are in no queue while they are here."""

    def __init__(self) -> None:
        self._children: dict[Request, list[Request]] = {}

    def __len__(self) -> int:
        return sum(len(children) for children in self._children.values())

    def __contains__(self, parent: Request) -> bool:
        """Whether somebody waits for this request's KV."""
        return parent in self._children

    def add(self, parent: Request, child: Request) -> None:
        child.fork_parent = parent
        self._children.setdefault(parent, []).append(child)

    def remove(self, child: Request) -> None:
        """A child ended before its turn came."""
        parent = child.fork_parent
        assert parent is not None
        child.fork_parent = None
        children = self._children[parent]
        children.remove(child)
        if not children:
            del self._children[parent]

    def take(self, parent: Request) -> list[Request]:
        """All children of `parent`, which are no longer here."""
        children = self._children.pop(parent, [])
        for child in children:
            child.fork_parent = None
        return children

    def take_ready(self) -> list[tuple[Request, Request]]:
        """(parent, child) of the children whose parent runs and has computed all that they can share.

        Steps scheduled so far have written it, so a copy in the next step reads what it should.
        """
        if not self._children:
            return []
        ready = [
            (parent, child)
            for parent, children in self._children.items()
            if parent.status is RequestStatus.RUNNING
            for child in children
            if parent.num_computed_tokens >= child.num_tokens - 1
        ]
        for _, child in ready:
            self.remove(child)
        return ready


def check_fork(parent: Request, child: Request) -> None:
    """Raises ValueError unless `child`, but for its last token, begins as `parent` does."""
    shared = child.num_tokens - 1
    if shared > len(parent.token_ids) or child.token_ids[:shared] != parent.token_ids[:shared]:
        raise ValueError(
            f"request {child.request_id!r} cannot fork from {parent.request_id!r}: all its tokens but the "
            f"last must be the first of its parent's"
        )
    if child.cache_salt != parent.cache_salt:
        raise ValueError(
            f"request {child.request_id!r} cannot fork from {parent.request_id!r}: their cache_salt differs"
        )
