"""The engine: requests in, one step after another, outputs out. All in this process."""

from __future__ import annotations

import time

from pagedinfer.beam_search import BeamSearchParams
from pagedinfer.chat_template import read_template
from pagedinfer.config import EngineConfig
from pagedinfer.distributed.worker_group import WorkerGroup
from pagedinfer.engine.advisor import Advisor
from pagedinfer.engine.batch import Batch
from pagedinfer.engine.beam_searches import BeamSearches
from pagedinfer.engine.garbage import FrozenGarbage
from pagedinfer.engine.generation_defaults import default_sampling_params
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.engine.input_processor import (
    InputProcessor,
    ProcessedPrompt,
    Prompt,
    num_known_tokens,
    truncate,
)
from pagedinfer.engine.launch_timing import LaunchTiming
from pagedinfer.engine.launched_steps import LaunchedSteps
from pagedinfer.engine.output_processor import OutputProcessor
from pagedinfer.engine.request import Request
from pagedinfer.engine.scheduler import Scheduler, SchedulerConfig
from pagedinfer.engine.seeds import mix64, request_seed
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.engine.tokenizer import load_tokenizer
from pagedinfer.logging import configure, get_logger
from pagedinfer.models.hub import fetch_model, fetch_tokenizer
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.outputs import RequestOutput
from pagedinfer.runner.worker import Worker
from pagedinfer.sampling_params import RequestOutputKind, SamplingParams
from pagedinfer.tracing.recorder import TracingScheduler
from pagedinfer.unicode_text import check_unicode

logger = get_logger(__name__)

_GLANCE = 1e-4  # seconds that a call waits where an urgent request may come, or an urgent step end


class LLMEngine:
    """A model, a scheduler, and the requests between them. One thread at a time may use it.

    Raises:
        ValueError, DownloadError, OutOfMemoryError, WeightsError: as `LLM`.
    """

    def __init__(self, config: EngineConfig) -> None:
        configure()
        if config.node_rank > 0:
            raise ValueError(
                f"the engine runs on node 0, and this is node {config.node_rank}; start `python -m "
                f"pagedinfer.distributed.node` here"
            )
        self.config = config
        self.model_config = ModelConfig.from_pretrained(fetch_model(config))
        self.tokenizer = (
            None
            if config.skip_tokenizer_init
            else load_tokenizer(fetch_tokenizer(config, self.model_config.path))
        )
        self.chat_template = None if config.chat_template is None else read_template(config.chat_template)
        """Instead of the tokenizer's own."""
        self._frozen_garbage = FrozenGarbage()  # the large imports are done, and the model is not there yet
        self.default_sampling_params = default_sampling_params(
            config.generation_config, self.model_config.generation
        )
        tokenizer = self.tokenizer  # a reference to self would be a cycle, and keep a dropped engine alive
        self.grammars = GrammarCompiler(
            lambda: tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids
        )
        """Of structured outputs."""
        self.worker = self._make_worker()
        self.scheduler = self._make_scheduler(
            SchedulerConfig(
                max_num_seqs=self.worker.max_num_seqs,
                max_num_batched_tokens=self.worker.max_num_batched_tokens,
                block_size=config.block_size,
                num_blocks=self.worker.num_blocks,
                num_cpu_blocks=self.worker.num_cpu_blocks,
                max_model_len=self.worker.max_model_len,
                enable_chunked_prefill=config.enable_chunked_prefill,
                enable_prefix_caching=config.enable_prefix_caching,
                scheduling_policy=config.scheduling_policy,
                preemption_mode=config.preemption_mode,
                long_prefill_token_threshold=config.long_prefill_token_threshold,
                cascade_attention=self.worker.cascade_attention and not config.disable_cascade_attn,
                watermark=config.watermark,
                urgent_lane=self.worker.urgent_lane is not None,
            )
        )
        self.scheduler.costs.block_bytes = self.worker.block_bytes
        self.input_processor = InputProcessor(self.tokenizer, self.model_config.vocab_size)
        self._outputs = OutputProcessor(self.tokenizer)
        self._eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self._beam_searches = BeamSearches(self.scheduler, self._eos_token_ids)
        overlap = config.async_scheduling
        self._timing: LaunchTiming | None = None
        """Of steps that are launched just in time; None: as early as they may."""
        if overlap is None:
            overlap = self.worker.device.type == "cuda"
            if overlap and config.scheduling_policy == "priority":  # an urgent one would find two ahead of it
                self._timing = LaunchTiming()
        self._launched = LaunchedSteps()
        self._urgent = LaunchedSteps()
        """Beside those, in the worker's urgent lane; one at most."""
        self._last_urgent_step = 0
        self._max_launched = 2 if overlap else 1
        self.advisor = Advisor(
            config,
            self.scheduler,
            device=str(self.worker.device),
            repetition_penalty=self.default_sampling_params.repetition_penalty,
        )
        self.advisor.warn_at_start()
        self.failed_request_ids: list[str] = []
        """Of the requests that the last failed step has ended; no output tells of them."""
        self._num_requests = 0
        self._closed = False

    def _make_worker(self) -> Worker | WorkerGroup:
        config, model_config = self.config, self.model_config
        known = num_known_tokens(self.tokenizer)
        if config.tensor_parallel_size > 1:
            return WorkerGroup(config, model_config, num_known_tokens=known)
        return Worker(config, model_config, num_known_tokens=known, grammars=self.grammars)

    def _make_scheduler(self, limits: SchedulerConfig) -> Scheduler:
        if self.config.trace is None:
            return Scheduler(limits)
        about = {
            "model": self.model_config.path.name,
            "architecture": self.model_config.architecture,
            "device": str(self.worker.device),
            "dtype": str(self.worker.dtype).removeprefix("torch."),
            "block_bytes": self.worker.block_bytes,
        }
        return TracingScheduler(limits, self.config.trace, about)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | ProcessedPrompt,
        params: SamplingParams | None = None,
        priority: int = 0,
        *,
        output_kind: RequestOutputKind | None = None,
        stream: int | None = None,
    ) -> None:
        """Queues a request; `step` will work on it.

        Args:
            request_id: unique among the unfinished requests.
            prompt: as `LLM.generate` takes one.
            params: how to sample; by default as `LLM.get_default_sampling_params` says.
            priority: lower is more urgent; looked at under scheduling_policy="priority".
            output_kind: instead of the one in `params`.
            stream: the number of its first choice in what `step` streams; choice i goes by this plus i.

        Raises:
            ValueError: a malformed prompt or parameter, or an id that is in use.
            RequestTooLargeError: the request can never fit; the message has both sizes and what to change.
        """
        self.check_open()
        params = params or self.default_sampling_params
        self.check_params(params)
        self._check_new(request_id, priority, params.n)
        if not isinstance(prompt, ProcessedPrompt):
            prompt = self.input_processor.process(prompt)
        prompt = truncate(prompt, params, self.worker.max_model_len)
        bad_word_ids = self.input_processor.bad_word_ids(params.bad_words or ())
        output_kind = output_kind or params.output_kind
        final_only = output_kind is RequestOutputKind.FINAL_ONLY
        seed = request_seed(params.seed, self.config.seed, self._num_requests)
        first, *further = (
            Request(
                _choice_id(request_id, i),
                prompt.token_ids,
                params,
                eos_token_ids=self._eos_token_ids,
                seed=mix64(seed, i),
                priority=priority,
                skip_reading_prefix_cache=params.prompt_logprobs is not None,
                bad_word_ids=bad_word_ids,
                num_logprobs=self.model_config.vocab_size if params.logprobs == -1 else params.logprobs,
                cache_salt=prompt.cache_salt,
                needs_known_tokens=bool(params.logits_processors),
                reports_at_end=final_only and not params.stop_strings and params.logprobs is None,
                stream=None if stream is None or params.logprobs is not None else stream + i,
            )
            for i in range(params.n)
        )
        self.scheduler.add_request(first)
        for choice in further:
            self.scheduler.fork(request_id, choice)
        self._outputs.add(first, prompt, output_kind, further)
        self._num_requests += 1

    def _check_new(self, request_id: str, priority: int, num_choices: int = 1) -> None:
        """Raises ValueError, before anything is queued, if a name that a request would go by is in use."""
        if not isinstance(request_id, str):
            raise ValueError(f"request_id must be a string, got {request_id!r}")
        check_unicode("request_id", request_id)
        if not isinstance(priority, int):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        for i in range(num_choices):
            name = _choice_id(request_id, i)
            if name in self.scheduler.requests or name in self._outputs or name in self._beam_searches:
                raise ValueError(f"there is an unfinished request {name!r} already")

    def check_params(self, params: SamplingParams) -> None:
        """Raises ValueError if these parameters do not suit the model or its tokenizer."""
        params.check_model(self.model_config.vocab_size, self.config.max_logprobs)
        if params.structured_outputs is not None:
            self.grammars.matcher(params.structured_outputs)
        self.input_processor.bad_word_ids(params.bad_words or ())
        if params.logits_processors and self.config.tensor_parallel_size > 1:
            raise ValueError(
                "logits_processors are functions of this process, and the ranks of tensor parallelism are "
                "others: they need tensor_parallel_size=1"
            )

    def add_beam_search(
        self,
        request_id: str,
        prompt: Prompt | ProcessedPrompt,
        params: BeamSearchParams,
        priority: int = 0,
    ) -> None:
        """Queues a beam search. `step` gives its output once, at its end: a choice for each text, best first.

        Its tokens include the EOS token that ended it; it has no text.

        Raises:
            ValueError: a malformed prompt, an id that is in use, or more beams than max_num_seqs.
            RequestTooLargeError: as `add_request`.
        """
        self.check_open()
        self._check_new(request_id, priority)
        self._beam_searches.check_new(request_id)
        if not isinstance(prompt, ProcessedPrompt):
            prompt = self.input_processor.process(prompt)
        self._beam_searches.add(request_id, prompt, params, priority)

    def step(self, streamed: StreamedTokens | None = None) -> list[RequestOutput]:
        """Runs one step and returns what it gave: an output for each request that got a token or ended.

        With async_scheduling the next step has been launched before this one's results are taken in, and so
        before it is known which requests they end: what it draws for those is dropped. By default under
        scheduling_policy="priority" it is launched just before the device is done with this one. A call
        that waits for that moment, or for a step beside which a short urgent prompt could run, returns
        nothing after a while, so that requests which have come meanwhile can be added.

        If it fails, the requests in it are dropped, `failed_request_ids` names them, and the engine can be
        used again: other requests, those of a step that was launched after it among them, are computed again
        from the tokens that they have, and get the same ones as ever.

        Args:
            streamed: takes the tokens of choices that were added with a `stream` and have no
                log-probabilities, all but the first and the last of each: no output tells of them.
        """
        self.check_open()
        try:
            if self._launched:
                self._launch_urgent_step()
            while self._seconds_until_launch() == 0.0 and self._launch_step():
                pass
        except BaseException:  # of the scheduler: it is not known any more what is whose
            self._drop_all()
            raise
        steps = self._urgent if self._urgent.is_ready or not self._launched else self._launched
        if not steps:
            return []
        if steps is self._launched and (seconds := self._seconds_to_wait()):
            time.sleep(seconds)
            return []
        batch = steps.oldest
        try:
            return self._finish_step(steps, streamed)
        except Exception:
            self._drop_requests_of(batch)
            raise
        except BaseException:
            self._drop_all()
            raise

    def _seconds_until_launch(self) -> float | None:
        """When a step should be launched behind those that are; None: not before the next result."""
        launched = self._launched
        if launched.has_failed:
            return None
        if not launched:
            return 0.0
        if len(launched) >= self._max_launched or self.scheduler.needs_known_tokens:
            return None
        if self._timing is None:
            return 0.0
        return self._timing.seconds_until_launch(launched.oldest, launched.oldest_started_at)

    def _seconds_to_wait(self) -> float | None:
        """How long to wait before there may be something else to do; 0, None: until the next result."""
        seconds = self._seconds_until_launch()
        if self.scheduler.config.urgent_lane and not self._launched.is_ready:
            return min(seconds or _GLANCE, _GLANCE)
        return seconds

    def _launch_step(self) -> bool:
        """Schedules a step and has the device begin it; False if there is nothing that can run now."""
        began_at = time.perf_counter()
        batch = self.scheduler.schedule()
        if batch.is_empty():
            return False
        self._outputs.note_scheduled(self._beam_searches.note_scheduled(batch.admitted))
        try:
            handle = self.worker.execute(batch)
        except Exception as error:
            self._launched.append_failed(batch, error)
        else:
            self._launched.append(batch, handle)
            if self._timing is not None:
                self._timing.observe_launch(time.perf_counter() - began_at)
        return True

    def _launch_urgent_step(self) -> None:
        """Has the device begin a step of an urgent prompt beside those under way, if there is one for it."""
        batch = self.scheduler.schedule_urgent()
        if batch is None:
            return
        assert self.worker.urgent_lane is not None
        self._last_urgent_step = batch.step
        self._outputs.note_scheduled(self._beam_searches.note_scheduled(batch.admitted))
        try:
            self._urgent.append(batch, self.worker.urgent_lane.execute(batch))
        except Exception as error:
            self._urgent.append_failed(batch, error)

    def _finish_step(self, steps: LaunchedSteps, streamed: StreamedTokens | None) -> list[RequestOutput]:
        """Takes in what the oldest of these gives."""
        batch, output, seconds = steps.take_result()
        was_held_up = batch.step <= self._last_urgent_step + 1
        if self._timing is not None and not was_held_up:
            self._timing.observe_step(batch, seconds, steps.waited)
        self._observe_costs(steps.num_tokens, seconds)
        updates = self.scheduler.update(batch, output, streamed)
        self.advisor.note_step()
        self._outputs.note_prompts(output.prompts)
        updates, found = self._beam_searches.process(updates)
        return self._outputs.process(updates, self.scheduler) + found

    def _drop_requests_of(self, batch: Batch) -> None:
        """The way back after this step has failed; see `step`."""
        if not batch.requests:  # a step of copies alone: who needed them is not known
            self._drop_all()
            return
        self._launched.clear()
        self._urgent.clear()
        failed = [request.request_id for request in batch.requests]
        self.scheduler.recover(failed)
        self.failed_request_ids = self._outputs.drop(failed, self.scheduler) + self._beam_searches.drop(
            failed
        )

    def _drop_all(self) -> None:
        self._launched.clear()
        self._urgent.clear()
        self.scheduler.abort_all()
        self.failed_request_ids = self._outputs.clear() + self._beam_searches.clear()

    def _observe_costs(self, num_tokens: int, seconds: float) -> None:
        """Tells the scheduler what prefilling and swapping take, from which it chooses between them."""
        costs = self.scheduler.costs
        if num_tokens >= self.worker.max_num_batched_tokens // 4:  # smaller steps are slower for a token
            costs.observe_prefill(num_tokens, seconds)
        for num_blocks, swap_seconds in self.worker.take_swap_timings():  # those that are over by now
            costs.observe_swap(num_blocks, swap_seconds)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees all it holds; its output so far, None if it is not there (any more)."""
        self._launched.note_abort(request_id)
        output = self._outputs.abort(request_id, self.scheduler)
        return self._beam_searches.abort(request_id) if output is None else output

    def stop_choice(self, request_id: str, index: int) -> bool:
        """Ends one choice of a request, for callers that look for stop strings themselves.

        No output tells of it. True: it was the last one, and the request has ended.
        """
        return self._outputs.stop_choice(request_id, index, self.scheduler)

    def has_unfinished_requests(self) -> bool:
        """Whether there is anything to do."""
        return self.scheduler.has_unfinished_requests()

    def reset_prefix_cache(self) -> None:
        """Forgets the KV of earlier prompts, except what running requests are using."""
        self.scheduler.reset_prefix_cache()

    def close(self) -> None:
        """Drops all requests and gives all memory back. Harmless when repeated."""
        if not self._closed:
            self._closed = True
            self._drop_all()
            self._frozen_garbage.release()
            if isinstance(self.scheduler, TracingScheduler):
                self.scheduler.close()
            self.worker.close()

    def check_open(self) -> None:
        """Raises RuntimeError if the engine has been closed."""
        if self._closed:
            raise RuntimeError("this engine has been closed")


def _choice_id(request_id: str, index: int) -> str:
    """What the scheduler calls a choice of a request: the first has the request's own name."""
    return f"{request_id}#{index}" if index else request_id
