"""An engine's process without a model: each request gets its own prompt's tokens back, again and again.

So a test says in the prompt what is generated. What goes wrong it says in the cache_salt: "fail:3" raises
in the step of the third token, "die:3" ends the process there, "slow:0.01" makes every step take so many
seconds longer, "pace:0.01" lets one begin every so many seconds, "break" lets the device fail with the first
token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.stats import SchedulerCounters, SchedulerStats, WaitingReason
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.server.engine_process import serve
from pagedinfer.server.messages import EngineLimits


class ScriptedRequest:
    def __init__(self, prompt: ProcessedPrompt, params: SamplingParams) -> None:
        self.prompt, self.params = prompt, params
        self.trouble, _, value = prompt.cache_salt.partition(":")
        self.value = float(value or 1)
        self.metrics = RequestMetrics(queued_ts=time.monotonic())
        self.num_tokens = 0
        self.unfinished = set(range(params.n))


class ScriptedEngine:
    """Emits one token of every running request in every step; `max_num_seqs` run, the others wait."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.requests: dict[str, ScriptedRequest] = {}
        self.statistics = SchedulerCounters()
        self.broken = False
        self.failed_request_ids: list[str] = []
        self.next_step_at = 0.0
        model = json.loads((Path(config["model"]) / "config.json").read_text())
        self.eos, self.vocab_size = model["eos_token_id"], model["vocab_size"]
        if config["seed"] == 13:
            raise ValueError("seed=13 brings bad luck")

    def add_request(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, priority: int
    ) -> None:
        self.requests[request_id] = ScriptedRequest(prompt, params)
        self.statistics.num_prompt_tokens += len(prompt.token_ids)

    def abort_request(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.statistics.num_finished["abort"] += 1

    def stop_choice(self, request_id: str, index: int) -> bool:
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.unfinished.discard(index)
        if not request.unfinished:
            del self.requests[request_id]
        return not request.unfinished

    def step(self, streamed: StreamedTokens) -> list[RequestOutput]:
        running = list(self.requests.items())[: self.max_num_seqs]
        self.statistics.num_scheduled_tokens += len(running)
        self.statistics.num_steps += 1
        outputs = []
        for request_id, request in running:
            output = self.output(request_id, request)
            if output.finished or request.num_tokens == 1 or request.params.logprobs is not None:
                outputs.append(output)
                continue
            for choice in output.outputs:
                streamed.streams.append(int(request_id) + choice.index)
                streamed.token_ids += choice.token_ids
        pause = [request.value for _, request in running if request.trouble == "slow"]
        time.sleep(max(pause, default=0.0))
        pace = [request.value for _, request in running if request.trouble == "pace"]
        self.next_step_at = max(self.next_step_at, time.monotonic() - 0.1) + max(pace, default=0.0)
        time.sleep(max(0.0, self.next_step_at - time.monotonic()))
        reason = self.waiting_reason()
        if reason is not None:
            self.statistics.limited_steps[reason] += 1
        return outputs

    def output(self, request_id: str, request: ScriptedRequest) -> RequestOutput:
        script, params = request.prompt.token_ids, request.params
        token = script[request.num_tokens % len(script)]
        request.num_tokens += 1
        self.trouble(request)
        request.metrics.first_token_ts = request.metrics.first_token_ts or time.monotonic()
        request.metrics.scheduled_ts = request.metrics.scheduled_ts or request.metrics.first_token_ts
        request.metrics.last_token_ts = time.monotonic()
        reason: FinishReason | None = None
        stop_reason = None
        may_stop = request.num_tokens > params.min_tokens
        if may_stop and not params.ignore_eos and token == self.eos:
            reason = "stop"
        elif may_stop and token in (params.stop_token_ids or ()):
            reason, stop_reason = "stop", token
        elif request.num_tokens >= min(params.max_tokens or 10**9, self.max_model_len - len(script)):
            reason = "length"
        self.statistics.num_generated_tokens += len(request.unfinished)
        logprobs = None if params.logprobs is None else [{token: Logprob(-0.5, 1, None)}]
        choices = [
            CompletionOutput(i, "", [token], -0.5 * request.num_tokens, logprobs, reason, stop_reason)
            for i in sorted(request.unfinished)
        ]
        if reason is not None:
            del self.requests[request_id]
            self.statistics.num_finished[reason] += len(choices)
        return RequestOutput(
            request_id, None, script, choices, finished=reason is not None, metrics=request.metrics
        )

    def trouble(self, request: ScriptedRequest) -> None:
        if request.trouble in ("fail", "break") and request.num_tokens == request.value:
            self.broken = request.trouble == "break"
            self.failed_request_ids = list(self.requests)[: self.max_num_seqs]
            for request_id in self.failed_request_ids:
                del self.requests[request_id]
            raise RuntimeError("an error in the middle of a step")
        if request.trouble == "die" and request.num_tokens == request.value:
            os._exit(9)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def reset_prefix_cache(self) -> None:
        pass

    def close(self) -> None:
        self.requests.clear()

    def stats(self) -> SchedulerStats:
        running = min(self.max_num_seqs, len(self.requests))
        return SchedulerStats(
            num_running=running,
            num_waiting=len(self.requests) - running,
            num_swapped=0,
            waiting_reason=self.waiting_reason(),
            num_blocks=100,
            num_used_blocks=running,
            num_cached_blocks=0,
            num_cpu_blocks=0,
            num_used_cpu_blocks=0,
            num_cached_cpu_blocks=0,
            num_allocated_kv_tokens=0,
            num_used_kv_tokens=0,
            num_reserved_kv_tokens=0,
            expected_output_tokens=0.0,
            counters=self.statistics,
        )

    def counters(self) -> SchedulerCounters:
        return self.statistics

    def waiting_reason(self) -> WaitingReason | None:
        return "slots" if len(self.requests) > self.max_num_seqs else None

    @property
    def max_num_seqs(self) -> int:
        return int(self.config["max_num_seqs"] or 256)

    @property
    def max_model_len(self) -> int:
        return int(self.config["max_model_len"] or 512)

    def limits(self) -> EngineLimits:
        return EngineLimits(
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=2048,
            block_size=16,
            num_blocks=100_000,
            num_cpu_blocks=0,
            enable_prefix_caching=True,
            max_logprobs=20,
            device="none",
            dtype="float32",
            default_sampling_params={},
            eos_token_ids=[self.eos],
        )

    def check_device(self) -> None:
        if self.broken:
            raise RuntimeError("the device is gone")


if __name__ == "__main__":
    sys.exit(serve(ScriptedEngine))
