"""The engine's process: takes requests from a socket, steps the engine, and sends what each step gave.

`python -m pagedinfer.server.engine_process FOLDER` reads a `Launch` from its standard input, which stays
open: when it ends, the process that started this one is gone, and so this one goes too, whatever it is doing,
and takes the folder of the socket along.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Protocol

import msgspec
import zmq

from pagedinfer.engine.input_processor import ProcessedPrompt
from pagedinfer.engine.stats import SchedulerCounters, SchedulerStats
from pagedinfer.engine.streamed_tokens import StreamedTokens
from pagedinfer.errors import PagedinferError, RequestTooLargeError
from pagedinfer.logging import configure, get_logger
from pagedinfer.outputs import CompletionOutput, Logprob, RequestOutput
from pagedinfer.sampling_params import SamplingParams
from pagedinfer.server import messages as wire

if TYPE_CHECKING:
    from pagedinfer.engine.engine import LLMEngine

logger = get_logger(__name__)

_STATS_SECONDS = 0.05  # at most so often while steps follow each other


class Launch(msgspec.Struct):
    """What a new engine process is told, as one line of JSON."""

    config: dict[str, Any]  # of an EngineConfig


def address(folder: str) -> str:
    """Of the socket in a folder, which is private to the user."""
    return f"ipc://{folder}/engine"


class Engine(Protocol):
    """What the loop needs of an engine; `LLMEngine`, or a scripted one in a test."""

    def add_request(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, priority: int
    ) -> None: ...
    def abort_request(self, request_id: str) -> object: ...
    def stop_choice(self, request_id: str, index: int) -> bool: ...
    def step(self, streamed: StreamedTokens) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def reset_prefix_cache(self) -> None: ...
    def close(self) -> None: ...
    def stats(self) -> SchedulerStats: ...
    def counters(self) -> SchedulerCounters: ...
    def limits(self) -> wire.EngineLimits: ...
    def check_device(self) -> None: ...
    @property
    def failed_request_ids(self) -> list[str]: ...


class EngineLoop:
    """Serves one peer until it says `Shutdown`.

    It waits for the socket while there is nothing to do, and takes what has come between two steps.
    """

    def __init__(self, engine: Engine, socket: zmq.Socket[bytes]) -> None:
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(wire.ToEngine)
        self._encoder = msgspec.msgpack.Encoder()
        self._step_seconds = 0.0
        self._stats_sent_at = 0.0
        self._stats_sent_idle = False
        self._num_scheduled_tokens = 0

    def run(self) -> None:
        """Returns after `Shutdown`. What a step raises ends the requests in it, and the loop goes on.

        Raises:
            Exception: the device cannot be used any more.
        """
        while self._receive():
            if self._engine.has_unfinished_requests():
                self._step()

    def _receive(self) -> bool:
        """Carries out what has come; False: to end. Waits if there is nothing else to do."""
        if not self._engine.has_unfinished_requests():
            if not self._stats_sent_idle:
                self._send_outputs([], StreamedTokens(), idle=True)
            self._socket.poll()
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return True
            try:
                message = self._decoder.decode(data)
            except msgspec.MsgspecError as error:
                logger.error("a message that is none of ours was ignored: %s", error)
                continue
            if isinstance(message, wire.Shutdown):
                return False
            self._carry_out(message)

    def _carry_out(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.AddRequest):
            self._add(message)
        elif isinstance(message, wire.AbortRequests):
            for number in message.numbers:
                self._engine.abort_request(str(number))
            self._stats_sent_idle = False
        elif isinstance(message, wire.StopChoice):
            self._engine.stop_choice(str(message.number), message.index)
            self._stats_sent_idle = False
        elif isinstance(message, wire.ResetPrefixCache):
            self._engine.reset_prefix_cache()

    def _add(self, message: wire.AddRequest) -> None:
        prompt = ProcessedPrompt(None, message.prompt_token_ids, message.cache_salt)
        try:
            params = wire.params_from_wire(message.params)
            self._engine.add_request(str(message.number), prompt, params, message.priority)
        except RequestTooLargeError as error:
            self._fail([message.number], "too_large", error)
        except ValueError as error:
            self._fail([message.number], "invalid", error)
        except Exception as error:
            logger.exception("a request could not be added")
            self._fail([message.number], "internal", error)

    def _fail(self, numbers: list[int], kind: str, error: Exception) -> None:
        message = str(error) or type(error).__name__
        self._send(wire.RequestsFailed(numbers, kind, message))

    def _step(self) -> None:
        started = time.perf_counter()
        streamed = StreamedTokens()
        try:
            outputs = self._engine.step(streamed)
        except Exception as error:
            lost = [int(request_id) for request_id in self._engine.failed_request_ids]
            logger.exception("a step failed; the requests in it are lost: %d", len(lost))
            self._fail(lost, "internal", error)
            self._engine.check_device()
            return
        self._step_seconds += time.perf_counter() - started
        self._send_outputs(outputs, streamed, idle=False)

    def _send_outputs(self, outputs: list[RequestOutput], streamed: StreamedTokens, *, idle: bool) -> None:
        stats = None
        scheduled = self._engine.counters().num_scheduled_tokens
        num_step_tokens = scheduled - self._num_scheduled_tokens
        self._num_scheduled_tokens = scheduled
        now = time.monotonic()
        if idle or now - self._stats_sent_at >= _STATS_SECONDS:
            stats = self._stats()
            self._stats_sent_at = now
        self._stats_sent_idle = idle
        if not outputs and not streamed.streams and not num_step_tokens and stats is None:
            return
        deltas = [_request_delta(output) for output in outputs]
        tokens = wire.TokenColumns.pack(streamed.streams, streamed.token_ids)
        self._send(wire.Outputs(deltas, tokens, num_step_tokens, stats))

    def _stats(self) -> wire.EngineStats:
        stats = self._engine.stats()
        counters = stats.counters
        return wire.EngineStats(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_swapped=stats.num_swapped,
            waiting_reason=stats.waiting_reason,
            kv_cache_usage=stats.kv_cache_usage,
            cpu_cache_usage=stats.cpu_cache_usage,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generated_tokens=counters.num_generated_tokens,
            num_preemptions_swap=counters.num_preemptions_swap,
            num_preemptions_recompute=counters.num_preemptions_recompute,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            num_steps=counters.num_steps,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_blocks_swapped_in=counters.num_blocks_swapped_in,
            num_blocks_swapped_out=counters.num_blocks_swapped_out,
            step_seconds=self._step_seconds,
            limited_steps=counters.limited_steps,
        )

    def _send(self, message: wire.FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))


def _request_delta(output: RequestOutput) -> wire.RequestDelta:
    delta = wire.RequestDelta(int(output.request_id), [_choice_delta(choice) for choice in output.outputs])
    delta.num_cached_tokens = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        delta.prompt_logprobs = [
            None if entry is None else _token_logprobs(token_id, entry)
            for token_id, entry in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
        ]
    delta.error = output.error
    if output.finished:
        metrics = output.metrics
        delta.finished = True
        delta.num_preemptions = metrics.num_preemptions
        delta.times = wire.RequestTimes(
            metrics.queued_ts, metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts
        )
    return delta


def _choice_delta(choice: CompletionOutput) -> wire.ChoiceDelta:
    delta = wire.ChoiceDelta(choice.index, choice.token_ids)
    if choice.finish_reason is not None:
        delta.finish_reason = choice.finish_reason
        # Stop strings are the business of the process that has the text.
        delta.stop_reason = choice.stop_reason if isinstance(choice.stop_reason, int) else None
    if choice.logprobs is not None:
        delta.logprobs = [
            _token_logprobs(token_id, entry)
            for token_id, entry in zip(choice.token_ids, choice.logprobs, strict=True)
        ]
    return delta


def _token_logprobs(token_id: int, entry: dict[int, Logprob]) -> list[wire.TokenLogprob]:
    """The token that is there, and then the best ones, of which it may be one."""
    there = entry[token_id]
    found = [wire.TokenLogprob(token_id, there.logprob, there.rank or 0)]
    for place, (best_id, best) in enumerate(entry.items(), start=1):
        if best.rank == place:
            found.append(wire.TokenLogprob(best_id, best.logprob, place))
    return found


class LocalEngine:
    """An `LLMEngine` as the loop needs it: token ids in, token ids out."""

    def __init__(self, config: dict[str, Any]) -> None:
        from pagedinfer.config import EngineConfig
        from pagedinfer.engine.engine import LLMEngine

        self._engine: LLMEngine = LLMEngine(EngineConfig(**config))
        with suppress(ValueError):  # without llguidance or a tokenizer there are no grammars
            self._engine.grammars.prepare()
        self.abort_request = self._engine.abort_request
        self.stop_choice = self._engine.stop_choice
        self.step = self._engine.step
        self.has_unfinished_requests = self._engine.has_unfinished_requests
        self.reset_prefix_cache = self._engine.reset_prefix_cache
        self.close = self._engine.close
        self.stats = self._engine.scheduler.stats

    def add_request(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, priority: int
    ) -> None:
        self._engine.add_request(request_id, prompt, without_text(params), priority, stream=int(request_id))

    def counters(self) -> SchedulerCounters:
        return self._engine.scheduler.counters

    @property
    def failed_request_ids(self) -> list[str]:
        return self._engine.failed_request_ids

    def limits(self) -> wire.EngineLimits:
        engine, worker = self._engine, self._engine.worker
        return wire.EngineLimits(
            vocab_size=engine.model_config.vocab_size,
            max_model_len=worker.max_model_len,
            max_num_seqs=worker.max_num_seqs,
            max_num_batched_tokens=worker.max_num_batched_tokens,
            block_size=engine.config.block_size,
            num_blocks=worker.num_blocks,
            num_cpu_blocks=worker.num_cpu_blocks,
            enable_prefix_caching=engine.config.enable_prefix_caching,
            max_logprobs=engine.config.max_logprobs,
            device=str(worker.device),
            dtype=str(worker.dtype).removeprefix("torch."),
            default_sampling_params=wire.params_to_wire(engine.default_sampling_params),
            eos_token_ids=list(engine.model_config.eos_token_ids),
            settings={
                name: getattr(engine.config, name)
                for name in ("gpu_memory_utilization", "enforce_eager", "scheduling_policy", "watermark")
            }
            | {"repetition_penalty": engine.default_sampling_params.repetition_penalty},
        )

    def check_device(self) -> None:
        """Raises what the device raises if it can compute nothing any more, as after an illegal access."""
        self._engine.worker.check_device()


def without_text(params: SamplingParams) -> SamplingParams:
    """The same for an engine that makes no text: no stop strings, which are looked for elsewhere."""
    return replace(params, detokenize=False, stop=None)


def serve(make_engine: Callable[[dict[str, Any]], Engine]) -> int:
    """Runs an engine's process and returns its exit code.

    Args:
        make_engine: makes the engine, from the parameters of an EngineConfig.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    # Unbuffered: the thread that reads on must hold no lock of an object that the interpreter cleans up.
    lifeline = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115
    folder = sys.argv[1]
    line = lifeline.readline()
    if not line.endswith(b"\n"):  # the parent was gone before it could say anything
        shutil.rmtree(folder, ignore_errors=True)
        return 1
    launch = msgspec.json.decode(line, type=Launch)
    threading.Thread(target=_end_with_parent, args=(lifeline, folder), daemon=True).start()
    configure()
    # Outputs come and go by the hundred in each step, and hold no cycles: looking for some costs a tenth.
    gc.set_threshold(100_000, 50, 100)
    context = zmq.Context(io_threads=1)
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 1000)  # ms for the last messages to leave
    socket.connect(address(folder))
    encode = msgspec.msgpack.encode
    try:
        try:
            engine = make_engine(launch.config)
        except (PagedinferError, ValueError, OSError) as error:
            socket.send(encode(wire.StartFailed(str(error))))
            return 1
        except Exception as error:
            logger.exception("the engine cannot start")
            socket.send(encode(wire.StartFailed(f"{type(error).__name__}: {error}")))
            return 1
        socket.send(encode(wire.Ready(engine.limits())))
        EngineLoop(engine, socket).run()
        engine.close()
        return 0
    except Exception:
        logger.exception("the engine has failed")
        return 1
    finally:
        socket.close()
        context.term()


def _end_with_parent(lifeline: IO[bytes], folder: str) -> None:
    """Waits for the parent's end, then ends this process at once, in the middle of a step too."""
    lifeline.read()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(serve(LocalEngine))
