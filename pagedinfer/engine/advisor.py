"""Watches an engine and says in its log what to change, seldom."""

from __future__ import annotations

import time

from pagedinfer.config import EngineConfig
from pagedinfer.engine.advice import Advice, Facts, advise
from pagedinfer.engine.scheduler import Scheduler
from pagedinfer.logging import get_logger

logger = get_logger(__name__)

_STEPS = 1000  # between two looks
_SECONDS = 600.0  # between two warnings of one rule


class Advisor:
    """Looks at a scheduler after each step, and applies the rules to what it sees from time to time.

    Args:
        config, scheduler: of the engine.
        device: what the engine settled on.
        repetition_penalty: the model's default.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        *,
        device: str,
        repetition_penalty: float = 1.0,
    ) -> None:
        self._config = config
        self._scheduler = scheduler
        self._device = device
        self._repetition_penalty = repetition_penalty
        self._said: dict[str, float] = {}  # when a rule was last warned of
        self._num_running = 0
        self._usage = 0.0
        self._start = self._counts()
        self._limited_before = dict(scheduler.counters.limited_steps)

    def warn_at_start(self) -> None:
        """What the parameters alone tell."""
        self._warn(advise(self.facts()))

    def note_step(self) -> None:
        """A step has ended."""
        scheduler = self._scheduler
        self._num_running += len(scheduler.running)
        pool = scheduler.kv.pool
        self._usage = max(self._usage, 1 - pool.num_free / pool.num_blocks)
        if scheduler.counters.num_steps - self._start[0] >= _STEPS:
            self._warn(advise(self.facts()))
            self.restart()

    def restart(self) -> None:
        """Forgets what was seen so far."""
        self._num_running, self._usage = 0, 0.0
        self._start = self._counts()
        self._limited_before = dict(self._scheduler.counters.limited_steps)

    def facts(self) -> Facts:
        """The parameters, and what was seen since the last look."""
        limits, config = self._scheduler.config, self._config
        steps, finished, preemptions, recomputed = (
            now - then for now, then in zip(self._counts(), self._start, strict=True)
        )
        return Facts(
            device="cuda" if self._device.startswith("cuda") else "cpu",
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            num_kv_tokens=limits.num_kv_tokens,
            num_cpu_blocks=limits.num_cpu_blocks,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enable_prefix_caching=limits.enable_prefix_caching,
            enforce_eager=config.enforce_eager,
            scheduling_policy=limits.scheduling_policy,
            watermark=limits.watermark,
            repetition_penalty=self._repetition_penalty,
            num_steps=steps,
            num_finished=finished,
            num_preemptions=preemptions,
            num_recomputed=recomputed,
            limited_steps={
                reason: count - self._limited_before[reason]
                for reason, count in self._scheduler.counters.limited_steps.items()
            },
            mean_running=self._num_running / steps if steps else None,
            kv_cache_usage=self._usage if steps else None,
        )

    def _counts(self) -> tuple[int, int, int, int]:
        """Steps, finished requests, preemptions, and those of them that recompute."""
        counters = self._scheduler.counters
        finished = sum(counters.num_finished.values())
        # To displace others is what urgent requests are for.
        preemptions = counters.num_preemptions - counters.num_displaced
        return counters.num_steps, finished, preemptions, counters.num_preemptions_recompute

    def _warn(self, found: list[Advice]) -> None:
        now = time.monotonic()
        for advice in found:
            if now - self._said.get(advice.rule, -_SECONDS) >= _SECONDS:
                self._said[advice.rule] = now
                logger.warning("advice (%s): try %s", advice.rule, advice)
