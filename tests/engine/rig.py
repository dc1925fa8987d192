"""A scheduler on a fake runner, and what came out: what the scheduler's tests have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedinfer.engine.batch import Batch, StepOutput
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import RequestUpdate, Scheduler, SchedulerConfig
from pagedinfer.engine.streamed_tokens import StreamedTokens
from tests.engine.fake_runner import FakeRunner, expected_output, params


def make_request(request_id: str, prompt: list[int], **fields: Any) -> Request:
    """Fields that a request does not know go into its sampling parameters."""
    own = (
        *("priority", "seed", "cache_salt", "eos_token_ids", "output_token_ids"),
        *("skip_reading_prefix_cache", "stream", "reports_at_end"),
    )
    extra = {name: fields.pop(name) for name in own if name in fields}
    return Request(request_id, prompt, params(**fields), **extra)


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 48 for i in range(length)]


SWAPPING: dict[str, Any] = {
    "num_blocks": 9,
    "num_cpu_blocks": 8,
    "max_num_seqs": 2,
    "scheduling_policy": "priority",
    "preemption_mode": "swap",
    "max_model_len": 32,
    "enable_prefix_caching": False,
}
"""The configuration that `displace_victim` needs."""


class Rig:
    """A scheduler, a fake runner, and what every request got."""

    def __init__(self, swap_in_steps: int = 0, **config: Any) -> None:
        defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 4, "num_blocks": 64}
        # So that a small pool means preemptions; what the forecast does is in test_scheduler_admission.
        defaults["admission_policy"] = "greedy"
        self.config = SchedulerConfig(**(defaults | {"max_model_len": 64} | config))
        self.scheduler = Scheduler(self.config)
        self.runner = FakeRunner(self.config, swap_in_steps)
        self.outputs: dict[str, list[int]] = {}
        self.streams: dict[int, list[int]] = {}  # of these outputs, those of requests with a `stream`
        self.ends: dict[str, tuple[str | None, int | str | None]] = {}
        self.requests: dict[str, Request] = {}
        self.given: dict[str, list[int]] = {}  # the tokens that they were added with
        self.batch = Batch(0)  # of the last step

    def add(self, request_id: str, prompt: list[int], **fields: Any) -> Request:
        request = make_request(request_id, prompt, **fields)
        self.scheduler.add_request(request)
        return self._track(request)

    def fork(self, parent_id: str, request_id: str, prompt: list[int], **fields: Any) -> Request:
        request = make_request(request_id, prompt, **fields)
        self.scheduler.fork(parent_id, request)
        return self._track(request)

    def _track(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.given[request.request_id] = request.token_ids.copy()
        self.outputs[request.request_id] = []
        if request.stream is not None:
            self.streams[request.stream] = self.outputs[request.request_id]
        return request

    def step(self) -> list[RequestUpdate]:
        self.batch = batch = self.scheduler.schedule()
        if batch.is_empty():
            return []
        return self.update(batch, self.runner.execute(batch).result())

    def update(self, batch: Batch, output: StepOutput) -> list[RequestUpdate]:
        """As the scheduler's; what it streams is taken in, too."""
        streamed = StreamedTokens()
        updates = self.scheduler.update(batch, output, streamed)
        for stream, token in zip(streamed.streams, streamed.token_ids, strict=True):
            self.streams[stream].append(token)
        return self.apply(updates)

    def step_until(self, reached: Callable[[], object], max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if reached():
                return
            self.step()
        raise AssertionError("it never comes to that")

    def apply(self, updates: list[RequestUpdate]) -> list[RequestUpdate]:
        for update in updates:
            self.outputs[update.request_id] += update.new_token_ids
            if update.finish_reason is not None:
                self.ends[update.request_id] = (update.finish_reason, update.stop_reason)
        return updates

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step()
        assert not self.scheduler.has_unfinished_requests(), "somebody never finishes"
        self.check_all_free()

    def check_all_free(self) -> None:
        scheduler = self.scheduler
        assert scheduler.kv.num_free == self.config.num_blocks
        assert scheduler.kv.cpu_pool.num_free == self.config.num_cpu_blocks
        assert len(scheduler.running) == len(scheduler.waiting) == len(scheduler.forks) == 0
        scheduler.kv.pool.check()
        scheduler.kv.cpu_pool.check()

    def check_outputs(self) -> None:
        for request_id, output in self.outputs.items():
            request, given = self.requests[request_id], self.given[request_id]
            assert output == expected_output(given, request.seed, len(output)), request_id
            assert len(given) + len(output) == len(request.token_ids), f"{request_id} lacks some"

    def displace_victim(self) -> Request:
        """An urgent request takes the slot of one, beside "long", whose way back from the CPU is slow."""
        self.scheduler.costs.swap_bytes_per_second = 1.0
        self.add("long", prompt_of(4), max_tokens=20, priority=1)
        victim = self.add("victim", prompt_of(8, first=9), max_tokens=8, priority=2)
        self.step()
        self.add("urgent", prompt_of(4, first=20), max_tokens=2, priority=0)
        return victim

    @property
    def num_preemptions(self) -> int:
        return sum(request.num_preemptions for request in self.requests.values())
