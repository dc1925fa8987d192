"""Request: its tokens, and what ends it."""

from __future__ import annotations

import pytest

from pagedinfer.engine.request import RequestStatus
from pagedinfer.engine.request_queue import RequestQueue
from tests.engine.rig import make_request


def test_status_and_finish_reason() -> None:
    unfinished = {RequestStatus.WAITING, RequestStatus.RUNNING, RequestStatus.SWAPPED}
    unfinished.add(RequestStatus.SWAPPING_IN)
    for status in RequestStatus:
        assert status.is_finished == (status not in unfinished)
        assert (status.finish_reason is None) == (status in unfinished)
    assert RequestStatus.FINISHED_ABORTED.finish_reason == "abort"


def test_tokens_are_prompt_and_output() -> None:
    request = make_request("a", [1, 2, 3], output_token_ids=[4])
    assert (request.prompt_token_ids, request.output_token_ids) == ([1, 2, 3], [4])
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_tokens) == (3, 1, 4)
    assert not request.has_unknown_tokens
    request.num_tokens += 1  # a step is scheduled that draws one
    assert request.has_unknown_tokens
    assert "'a'" in repr(request)


@pytest.mark.parametrize(
    ("ignore_eos", "min_tokens", "output", "status", "stop_reason"),
    [
        (False, 0, [9], RequestStatus.FINISHED_STOPPED, None),
        (False, 0, [7], RequestStatus.FINISHED_STOPPED, 7),
        (True, 0, [9], None, None),
        (True, 0, [7], RequestStatus.FINISHED_STOPPED, 7),
        (False, 1, [9], None, None),
        (False, 1, [1, 9], RequestStatus.FINISHED_STOPPED, None),
        (False, 0, [1, 1, 1], RequestStatus.FINISHED_LENGTH, None),
        (False, 0, [1, 1, 9], RequestStatus.FINISHED_STOPPED, None),
        (False, 5, [1, 1, 9], RequestStatus.FINISHED_LENGTH, None),
        (False, 0, [1], None, None),
    ],
)
def test_check_stop(
    ignore_eos: bool,
    min_tokens: int,
    output: list[int],
    status: RequestStatus | None,
    stop_reason: int | None,
) -> None:
    request = make_request(
        "a",
        [1],
        eos_token_ids=frozenset([9]),
        stop_token_ids=[7],
        ignore_eos=ignore_eos,
        min_tokens=min_tokens,
        output_token_ids=output,
    )
    request.max_total_tokens = 4
    assert request.check_stop() is status
    assert request.stop_reason == stop_reason


def test_what_ends_by_length_only() -> None:
    assert make_request("a", [1]).ends_by_length_only
    assert make_request("a", [1], ignore_eos=True, eos_token_ids=frozenset([9])).ends_by_length_only
    assert not make_request("a", [1], eos_token_ids=frozenset([9])).ends_by_length_only
    assert not make_request("a", [1], stop_token_ids=[7]).ends_by_length_only
    assert not make_request("a", [1], stop=["x"]).ends_by_length_only


def test_the_queue_is_in_order_of_urgency() -> None:
    queue = RequestQueue()
    requests = {}
    for name, urgency in [("c", (1, 2, 0)), ("a", (0, 9, 0)), ("b", (1, 1, 3)), ("d", (1, 2, 1))]:
        requests[name] = make_request(name, [1])
        requests[name].urgency = urgency
        queue.add(requests[name])
    assert [request.request_id for request in queue] == ["a", "b", "c", "d"]
    queue.remove(requests["b"])
    with pytest.raises(ValueError, match="'b' is not waiting"):
        queue.remove(requests["b"])
    assert queue.first() is queue.pop() is requests["a"]
    assert len(queue) == 2


def test_a_long_queue_is_taken_out_in_order() -> None:
    queue = RequestQueue()
    requests = [make_request(str(i), [1]) for i in range(300)]
    for i, request in enumerate(requests):
        request.urgency = (0, i * 7 % 300, 0)
        queue.add(request)
    queue.remove(requests[43])  # the second
    taken = [queue.pop().urgency[1] for _ in range(200)]
    assert taken == [0, *range(2, 201)]
    queue.add(requests[43])  # back in front
    assert queue.first() is requests[43]
    assert [queue.pop().urgency[1] for _ in range(len(queue))] == [1, *range(201, 300)]
    assert len(queue) == 0
    assert list(queue) == []
