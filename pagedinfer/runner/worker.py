"""One device with its model, or a rank's part of it, and KV cache: what an engine hands its batches to."""

from __future__ import annotations

import ctypes
import gc
import math
import sys
import time
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from pagedinfer.config import EngineConfig
from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.distributed.sharding import shard_heads
from pagedinfer.engine.batch import Batch
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.engine.step_planner import SHORT_PROMPT
from pagedinfer.engine.tokenizer import load_tokenizer
from pagedinfer.errors import OutOfMemoryError
from pagedinfer.logging import get_logger
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.hub import fetch_tokenizer
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import load_weights
from pagedinfer.runner.device import resolve_device, resolve_dtype, warn_if_busy
from pagedinfer.runner.graph_sizes import decode_sizes, forward_sizes
from pagedinfer.runner.kv_cache import KVCache, KVCacheShape
from pagedinfer.runner.memory import (
    GIB,
    MIB,
    KVCacheSize,
    Memory,
    cpu_memory,
    default_limits,
    describe_bytes,
    margin,
    size_kv_cache,
)
from pagedinfer.runner.model_runner import ModelRunner
from pagedinfer.runner.profile import GpuMemoryMeter, largest_batch
from pagedinfer.runner.start_turn import turn_to_start
from pagedinfer.runner.step_result import StepResult
from pagedinfer.runner.urgent_lane import UrgentLane

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

_TOKENS_BY_PRIORITY = 2048
_DEFAULT_SWAP_SPACE = 4 * GIB
_LEAST_GRAPH_BYTES = MIB // 2
_CAPTURE_SECONDS = 3.0  # at the start; graphs that are left are captured when they are first needed


class Worker:
    """Loads a model onto a device, gives it as much KV cache as fits, and executes batches.

    Args:
        config: what the engine is made with.
        model_config: of the model.
        num_known_tokens: token ids from here on are never drawn; by default all of the vocabulary may be.
        grammars: of structured outputs; by default made from the model's tokenizer when there is one.
        group: the ranks that share the model. Each has a worker of its own, with its part of the model; all
            are made at the same time, have the same limits, and execute the same batches.

    Raises:
        ValueError: a max_model_len beyond the model's.
        WeightsError: as `load_weights`.
        DeviceError: a device that cannot be used.
        OutOfMemoryError: the weights, the KV cache or the swap space do not fit.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        num_known_tokens: int | None = None,
        grammars: GrammarCompiler | None = None,
        group: Group = SINGLE_RANK,
    ) -> None:
        self._group = group
        self._grammars = grammars or _grammars_of(config, model_config)
        self._num_known_tokens = num_known_tokens
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        if group.rank == 0:
            warn_if_busy(self.device)
        self._config = config
        self._model_config = model_config
        # Ranks do not take turns: two groups of them could wait for each other.
        with turn_to_start(self.device) if group.size == 1 else nullcontext():
            self._start()

    def _start(self) -> None:
        config, model_config, group = self._config, self._model_config, self._group
        self._meter = GpuMemoryMeter(self.device) if self.device.type == "cuda" else None
        self.max_num_seqs, self.max_num_batched_tokens = group.least(self._limits())
        model_config.check_max_model_len(config.max_model_len)
        self._shape = KVCacheShape(
            num_layers=model_config.num_layers,
            num_kv_heads=shard_heads(model_config.num_heads, model_config.num_kv_heads, group).kv.size,
            block_size=config.block_size,
            head_dim=model_config.head_dim,
            dtype=self.dtype,
        )
        self._model = self._load()
        self._hold: torch.Tensor | None = None
        if self._wants_lane:
            self._hold = torch.zeros(1, dtype=torch.int32, device=self.device)
        size = self._size_cache()
        num_cpu_blocks = self._swap_space() // self._shape.block_bytes
        self.num_blocks, self.max_model_len, self.num_cpu_blocks = group.least(
            [size.num_blocks, size.max_model_len, num_cpu_blocks]
        )
        self._runner = self._make_runner(self.num_blocks, self.num_cpu_blocks, self.max_model_len)
        self._capture_graphs()
        self.urgent_lane: UrgentLane | None = None
        """For steps of urgent prompts beside the others; None: there is none."""
        if self._hold is not None:
            self.urgent_lane = self._make_lane(self._runner, self.max_model_len, self._hold)
        num_kv_tokens = self.num_blocks * config.block_size
        logger.info(
            "KV cache: %s tokens (%s blocks, %s); %.1f requests of %s tokens at once",
            f"{num_kv_tokens:,}",
            f"{self.num_blocks:,}",
            describe_bytes(self.num_blocks * self._shape.block_bytes),
            num_kv_tokens / self.max_model_len,
            f"{self.max_model_len:,}",
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the KV cache, or of a rank's part of it."""
        return self._shape.block_bytes

    @property
    def cascade_attention(self) -> bool:
        """Whether steps of decodes read a prefix that requests share once for all of them."""
        has_kernel = self.device.type != "cuda" or self.dtype != torch.float32
        return has_kernel and 0 in self._model_config.sliding_windows and bool(self._decode_sizes())

    def execute(self, batch: Batch) -> StepResult:
        """Starts a step; see `ModelRunner.execute`."""
        return self._runner.execute(batch)

    def take_swap_timings(self) -> list[tuple[int, float]]:
        """See `KVCache.take_swap_timings`."""
        return self._runner.take_swap_timings()

    def check_device(self) -> None:
        """Raises what the device raises if it can compute nothing any more, as after an illegal access."""
        torch.ones(1, device=self.device).add(1).item()

    def close(self) -> None:
        """Gives the weights' and the cache's memory back to the system. The worker is of no use after."""
        if self._meter is not None:
            torch.cuda.synchronize(self.device)
            self._log_peak(self._meter)
        if self.urgent_lane is not None:
            self.urgent_lane.close()
        self._runner.close()
        del self._runner, self.urgent_lane, self._model
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            _empty_pinned_cache()
        _trim_heap()

    def _limits(self) -> tuple[int, int]:
        """max_num_seqs and max_num_batched_tokens, by the size of the device where they were not given."""
        seqs, tokens = default_limits(None if self._meter is None else self._meter.total)
        config = self._config
        if config.scheduling_policy == "priority":  # an urgent request waits for the step under way
            tokens = min(tokens, _TOKENS_BY_PRIORITY)
        if not config.enable_chunked_prefill:
            tokens = max(tokens, config.max_model_len or self._model_config.max_model_len)
        return config.max_num_seqs or seqs, config.max_num_batched_tokens or tokens

    def _memory(self) -> Memory:
        """The device's memory; on a GPU what was free when the worker was made."""
        return cpu_memory() if self._meter is None else Memory(self._meter.total, self._meter.free)

    def _load(self) -> CausalLM:
        started = time.monotonic()

        def build(device: torch.device) -> CausalLM:
            return build_model(
                self._model_config,
                self.dtype,
                device,
                max_model_len=self._config.max_model_len,
                group=self._group,
            )

        blueprint = build(torch.device("meta"))
        num_bytes = sum(parameter.nbytes for parameter in blueprint.parameters())
        memory = self._memory()
        if num_bytes > memory.free:
            raise OutOfMemoryError(
                f"the weights need {describe_bytes(num_bytes)}; of {describe_bytes(memory.total)} in total, "
                f"{describe_bytes(memory.free)} are free on {self.device}"
            )
        model = build(self.device)
        use_tqdm = sys.stderr.isatty() and self._group.rank == 0
        load_weights(model, self._model_config.path, self._config.load_format, use_tqdm=use_tqdm)
        if self._meter is not None:
            _empty_pinned_cache()
        logger.info(
            "%s: %s of weights in %.1f s, %s on %s",
            self._model_config.architecture,
            describe_bytes(num_bytes),
            time.monotonic() - started,
            str(self.dtype).removeprefix("torch."),
            self.device if self._meter is None else torch.cuda.get_device_name(self.device),
        )
        return model

    @cached_property
    def _has_graphs(self) -> bool:
        if self.device.type != "cuda" or self._config.enforce_eager:
            return False
        if not self._group.can_be_captured:
            logger.info("no CUDA graphs: what the ranks tell each other goes through the CPU")
            return False
        if not self._model.can_be_captured:
            logger.info("no CUDA graphs: a step of %s waits for the device", self._model_config.architecture)
            return False
        return True

    @property
    def _wants_lane(self) -> bool:
        """Whether urgent requests get a lane: by default, where one stream can pass another."""
        config = self._config
        return (
            config.scheduling_policy == "priority"
            and config.async_scheduling is None
            and config.trace is None  # which has one order of steps
            and self._group.size == 1
            and self._has_graphs
        )

    def _decode_sizes(self) -> list[int]:
        """The sizes that steps of decodes are padded to; none: no CUDA graphs."""
        return decode_sizes(self.max_num_seqs) if self._has_graphs else []

    def _forward_sizes(self) -> list[int]:
        """The sizes that other steps are padded to; none: no CUDA graphs."""
        return forward_sizes(self.max_num_batched_tokens) if self._has_graphs else []

    def _capture_graphs(self) -> None:
        sizes, others = self._decode_sizes(), self._forward_sizes()
        if not sizes:
            return
        started = time.monotonic()
        count = self._runner.capture_graphs([sizes[-1], *sizes[:-1]], seconds=_CAPTURE_SECONDS)
        left = _CAPTURE_SECONDS + started - time.monotonic()
        num_others = self._runner.capture_forward_graphs([others[-1], *others[:-1]], seconds=left)
        logger.info(
            "CUDA graphs: %d of %d decode sizes and %d of %d other sizes captured in %.1f s",
            count,
            len(sizes),
            num_others,
            len(others),
            time.monotonic() - started,
        )

    def _make_runner(self, num_blocks: int, num_cpu_blocks: int, max_model_len: int) -> ModelRunner:
        cache = KVCache(self._shape, num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks, device=self.device)
        return self._make_runner_on(
            cache,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            decode_sizes=self._decode_sizes(),
            forward_sizes=self._forward_sizes(),
            hold=self._hold,
        )

    def _make_runner_on(self, cache: KVCache, **options: Any) -> ModelRunner:
        return ModelRunner(
            self._model,
            self._model_config,
            cache,
            num_known_tokens=self._num_known_tokens,
            processed_logprobs=self._config.logprobs_mode == "processed_logprobs",
            grammars=self._grammars,
            device=self.device,
            group=self._group,
            **options,
        )

    def _make_lane(self, runner: ModelRunner, max_model_len: int, hold: torch.Tensor) -> UrgentLane:
        """An urgent lane on the cache of a runner, with all its graphs."""
        sizes = forward_sizes(min(SHORT_PROMPT, self.max_num_batched_tokens)) if self._has_graphs else []
        own = self._make_runner_on(
            runner.cache, max_num_seqs=1, max_model_len=max_model_len, forward_sizes=sizes, priority=-1
        )
        lane = UrgentLane(own, runner.cache, hold)
        lane.capture_graphs(sizes)
        return lane

    def _size_cache(self) -> KVCacheSize:
        config = self._config
        explicit = config.kv_cache_memory_bytes
        if self._meter is None:
            memory = cpu_memory()
            available = memory.free // (4 * self._group.num_local_ranks) if explicit is None else explicit
            if available > memory.free:
                raise OutOfMemoryError(
                    f"kv_cache_memory_bytes={available} ({describe_bytes(available)}) is more than is free: "
                    f"{describe_bytes(memory.free)} of {describe_bytes(memory.total)}"
                )
            if explicit is None and config.num_gpu_blocks_override is not None:
                available = memory.free
            parameter = "kv_cache_memory_bytes"
        else:
            memory = self._memory()
            utilization = config.gpu_memory_utilization if explicit is None else 1.0
            available = self._profile(self._meter, utilization)
            parameter = "gpu_memory_utilization" if explicit is None else "kv_cache_memory_bytes"
            if explicit is not None:
                if explicit > available:
                    raise OutOfMemoryError(
                        f"kv_cache_memory_bytes={explicit} ({describe_bytes(explicit)}) is more than there "
                        f"is room for beside the weights and the largest step: {describe_bytes(available)}; "
                        f"of {describe_bytes(memory.total)} in total, {describe_bytes(memory.free)} were free"
                    )
                available = explicit
        return size_kv_cache(
            available_bytes=available,
            block_bytes=self._shape.block_bytes,
            block_size=config.block_size,
            model_max_len=self._model_config.max_model_len,
            max_model_len=config.max_model_len,
            num_blocks_override=config.num_gpu_blocks_override,
            memory=memory,
            parameter=parameter,
        )

    def _profile(self, meter: GpuMemoryMeter, utilization: float) -> int:
        """Runs the largest step; the bytes that it leaves of a share of the memory for the KV cache."""
        config = self._config
        meter.reset_peak()
        weights = meter.peak_reserved()
        max_model_len = config.max_model_len or self._model_config.max_model_len
        runner = self._make_runner(1, 0, max_model_len)
        batch = largest_batch(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        runner.profile(batch)
        step = meter.peak_reserved() - weights
        # The rows of the block table that a step gathers, which the profile run has short.
        step += 4 * self.max_num_seqs * -(-max_model_len // config.block_size)
        graphs = self._graph_bytes(runner, meter) + self._lane_bytes(runner, max_model_len, meter)
        outside = meter.outside_torch()
        runner.close()
        del runner
        torch.cuda.empty_cache()
        budget = int(meter.free * utilization)
        spare = margin(step)
        left = budget - weights - step - graphs - outside - spare
        logger.info(
            "GPU memory: %s, of which %s were free to us; budget %s (gpu_memory_utilization=%g): weights %s, "
            "largest step %s, CUDA graphs %s, outside torch %s, margin %s, KV cache %s",
            describe_bytes(meter.total),
            describe_bytes(meter.free),
            describe_bytes(budget),
            utilization,
            *(describe_bytes(part) for part in (weights, step, graphs, outside, spare, max(0, left))),
        )
        return left

    def _graph_bytes(self, runner: ModelRunner, meter: GpuMemoryMeter) -> int:
        """Captures four graphs; the bytes that all of them will take, beyond what is gone by now.

        They share memory, in torch's allocator; each takes some of the driver's besides.
        """
        sizes, others = self._decode_sizes(), self._forward_sizes()
        if not sizes:
            return 0
        meter.reset_peak()
        held = meter.held()
        runner.capture_graphs(sizes[-1:])
        runner.capture_forward_graphs(others[-1:])
        meter.reset_peak()
        shared = meter.held() - held
        outside = meter.outside_torch()
        few = sizes[:-1][-2:]
        runner.capture_graphs(few)
        each = max(_LEAST_GRAPH_BYTES, (meter.outside_torch() - outside) // max(1, len(few)))
        return shared + each * (len(sizes) + len(others) - len(few))

    def _lane_bytes(self, runner: ModelRunner, max_model_len: int, meter: GpuMemoryMeter) -> int:
        """What the urgent lane will take of torch's allocator and of the driver, measured on one."""
        if self._hold is None:
            return 0
        meter.reset_peak()
        before = meter.held() + meter.outside_torch()
        lane = self._make_lane(runner, max_model_len, self._hold)
        meter.reset_peak()
        after = meter.held() + meter.outside_torch()
        lane.close()
        return max(0, after - before)

    def _swap_space(self) -> int:
        """Bytes of CPU memory to swap to: this rank's share of what the ranks of a machine have together."""
        asked = self._config.swap_space
        free = cpu_memory().free
        if asked is None:
            wanted = min(_DEFAULT_SWAP_SPACE, free // 4) if self.device.type == "cuda" else 0
            return wanted // self._group.num_local_ranks
        wanted = int(asked * GIB)
        if wanted > free:
            raise OutOfMemoryError(
                f"swap_space={asked:g} GiB is more than is free: {describe_bytes(free)} of CPU memory"
            )
        return wanted // self._group.num_local_ranks

    def _log_peak(self, meter: GpuMemoryMeter) -> None:
        """What was really used; with a KV cache of a given size there is no budget to compare it with."""
        if self._config.kv_cache_memory_bytes is not None:
            return
        utilization = self._config.gpu_memory_utilization
        peak = meter.peak_reserved() + meter.outside_torch()
        budget = int(meter.free * utilization)
        would_fit = math.floor(100 * min(0.95, utilization + (budget - peak) / meter.free)) / 100
        logger.info(
            "GPU memory: a peak of %s in a budget of %s; gpu_memory_utilization=%.2f would have fit",
            describe_bytes(peak),
            describe_bytes(budget),
            would_fit,
        )


def _grammars_of(config: EngineConfig, model_config: ModelConfig) -> GrammarCompiler:
    """Grammars whose tokenizer is loaded when one is needed."""

    def tokenizer() -> PreTrainedTokenizerBase | None:
        if config.skip_tokenizer_init:
            return None
        return load_tokenizer(fetch_tokenizer(config, model_config.path))

    return GrammarCompiler(tokenizer, model_config.vocab_size, model_config.eos_token_ids)


def _empty_pinned_cache() -> None:
    """Has torch give back the pinned CPU memory that it keeps, if this torch can."""
    for module, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        if hasattr(module, name):
            getattr(module, name)()
            return


def _trim_heap() -> None:
    """Has the C library give free pages back, which it keeps for tensors of less than some MiB."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):  # not glibc
        return
