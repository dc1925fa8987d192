"""Executes batches: moves blocks, runs the model on the step's tokens, draws the next ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.engine.batch import AdmittedRequest, Batch, ScheduledRequest
from pagedinfer.engine.grammars import GrammarCompiler
from pagedinfer.layers.attention import AttentionBatch, PlansOnDemand
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.runner.best_tokens import PromptRater
from pagedinfer.runner.cuda_graphs import DecodeGraphs, StepVariant
from pagedinfer.runner.forward_graphs import ForwardGraphs
from pagedinfer.runner.graph_recorder import GraphRecorder
from pagedinfer.runner.input_batch import DrawInputs, InputBatch, ModelInputs, StepShape
from pagedinfer.runner.kv_cache import KVCache
from pagedinfer.runner.prefix_groups import pack_prefixes, unpack_prefixes
from pagedinfer.runner.sampler import Sampler
from pagedinfer.runner.step_result import DrawnTokens, StepResult
from pagedinfer.runner.top_logprobs import SlotTopLogprobs


@contextmanager
def _full_float32() -> Iterator[None]:
    """float32 products in float32, without TF32 or bfloat16, whatever the application has chosen."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class ModelRunner:
    """A model, its KV cache and the state of the requests in its slots.

    Steps of decodes alone are padded to one of `decode_sizes` and run as CUDA graphs on a GPU. Other steps,
    and those with a request whose sampling looks at the host, are padded to one of `forward_sizes`, and the
    model's part of them is a graph. Larger ones, and all if there are no sizes, are run as they are.

    `num_known_tokens`: token ids from here on are never drawn; by default all may be. `grammars`: of
    structured outputs; None: no request may have one. `group`: the ranks that share the model; each draws
    the same tokens from the same logits, so that none has to be told. `hold`: int32 [1] on the device, for
    which its steps look out (see `AttentionBatch`). `priority`: of its graphs (see `GraphRecorder`).
    """

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        decode_sizes: Sequence[int] = (),
        forward_sizes: Sequence[int] = (),
        num_known_tokens: int | None = None,
        processed_logprobs: bool = False,
        grammars: GrammarCompiler | None = None,
        group: Group = SINGLE_RANK,
        hold: Tensor | None = None,
        priority: int = 0,
    ) -> None:
        self._model = model
        self._config = config
        self._num_heads = config.num_heads // group.size
        self._cache = cache
        self._device = device
        self._hold = hold
        self._inputs = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=cache.shape.block_size,
            device=device,
        )
        num_known_tokens = min(config.vocab_size, num_known_tokens or config.vocab_size)
        self._sampler = Sampler(
            max_num_seqs=max_num_seqs,
            vocab_size=config.vocab_size,
            num_known_tokens=num_known_tokens,
            device=device,
            processed_logprobs=processed_logprobs,
            grammars=grammars,
        )
        self._prompt_rater = PromptRater(num_known_tokens, device)
        self._top_logprobs = SlotTopLogprobs(
            max_num_seqs=max_num_seqs, vocab_size=num_known_tokens, device=device
        )
        recorder = None
        if device.type == "cuda" and (decode_sizes or forward_sizes):
            recorder = GraphRecorder(device, priority)
        self._graphs = DecodeGraphs(decode_sizes, device, group, recorder)
        self._forward_graphs = ForwardGraphs(forward_sizes, max_num_seqs, device, group, recorder)

    @property
    def cache(self) -> KVCache:
        """Its KV cache."""
        return self._cache

    # What computes on tensors enters inference mode by itself. A step that is a mere replay does without: to
    # enter it takes 2 us, and up to 40 after a step of a large model, more than all else of a replay.
    def execute(self, batch: Batch) -> StepResult:
        """Starts a step and returns at once; the handle's `result` waits for what it drew."""
        result = self._start(batch)
        result.cache = self._cache
        return result

    def _start(self, batch: Batch) -> StepResult:
        for slot in batch.released_slots:
            self._inputs.release(slot)
            self._sampler.release(slot)
        if batch.admitted:
            self._admit(batch.admitted)
        self._cache.move(batch)
        self._sampler.upload()
        variant = self._variant(batch)
        if variant is not None:
            packed = self._inputs.pack_decodes(batch)
            if packed is not None:
                prefixes = pack_prefixes(batch.shared_prefixes)
                result = self._graphs.run(packed, self._decode, prefixes, variant)
                self._sampler.note(batch.requests, result.token_ids)
                return result
        return self._run(batch)

    @torch.inference_mode()
    def _admit(self, requests: Sequence[AdmittedRequest]) -> None:
        for request in requests:
            self._inputs.admit(request)
            self._sampler.set(request)
            self._prompt_rater.set(request)
            self._top_logprobs.set(request.slot, request.num_logprobs)

    @torch.inference_mode()
    def _run(self, batch: Batch) -> StepResult:
        """Any step. At most the model's part of it is a graph."""
        for request in batch.requests:
            if request.new_block_ids:
                self._inputs.append_blocks(request.slot, request.new_block_ids)
        sampled = [request for request in batch.requests if request.sample]
        drawn = DrawnTokens(len(sampled), self._device)
        if not batch.requests:
            return StepResult(drawn, 0)
        shape = self._forward_graphs.shape_for(batch.num_tokens)
        step = self._inputs.send(batch, shape)
        if shape is None:
            hidden = self._forward(self._inputs.unpack(step.packed, step.shape, step.num_columns))
        else:
            hidden = self._forward_graphs.run(step, self._forward_packed)
        with _full_float32():
            prompts = self._prompt_rater.rate(batch, hidden, self._model.compute_logits)
        best = None
        if sampled:
            logits = self._draw(step.draw, self._compute_logits(step.draw, hidden), drawn, sampled)
            if self._top_logprobs.most_wanted(batch) is not None:
                best = self._top_logprobs.compute(batch, logits, drawn.token_ids)
        return StepResult(drawn, len(sampled), best, prompts)

    def _variant(self, batch: Batch) -> StepVariant | None:
        """Which graph may serve this step, if it is one of decodes alone; None: no graph can."""
        requests = batch.requests
        if batch.admitted or len(requests) > self._graphs.max_rows:
            return None
        if not self._sampler.can_be_captured(requests):
            return None
        num_best = self._top_logprobs.most_wanted(batch)
        if num_best is not None:
            num_best = self._top_logprobs.captured_count(num_best)
            if num_best is None:
                return None
        return StepVariant(self._sampler.prepare(requests), num_best)

    @torch.inference_mode()
    def _decode(
        self, packed: Tensor, prefixes: Tensor | None, drawn: DrawnTokens, variant: StepVariant
    ) -> ops.TopLogprobs | None:
        """A step of decodes alone: see `InputBatch.unpack_decodes`, `pack_prefixes`. Waits for nothing."""
        inputs, draw = self._inputs.unpack_decodes(packed)
        hidden = self._forward(inputs, None if prefixes is None else unpack_prefixes(prefixes))
        logits = self._compute_logits(draw, hidden)
        slots, positions = draw.sample_slots, draw.output_positions
        self._sampler.draw(logits, slots, positions, drawn, changing=variant.changes is not None)
        self._inputs.set_last_tokens(slots, drawn.token_ids)
        if variant.num_best is None:
            return None
        return self._top_logprobs.of_all_rows(logits, drawn.token_ids, variant.num_best)

    def _draw(
        self,
        draw: DrawInputs,
        logits: Tensor,
        drawn: DrawnTokens,
        sampled: Sequence[ScheduledRequest],
    ) -> Tensor:
        """See `Sampler.sample`; the tokens go into the next step, too."""
        slots, positions = draw.sample_slots, draw.output_positions
        logits = self._sampler.sample(logits, slots, positions, drawn, sampled)
        self._inputs.set_last_tokens(slots, drawn.token_ids)
        return logits

    @torch.inference_mode()
    def capture_graphs(self, sizes: Sequence[int], *, seconds: float = math.inf) -> int:
        """See `DecodeGraphs.capture`."""
        self._sampler.upload()
        return self._graphs.capture(sizes, self._decode, seconds=seconds)

    @torch.inference_mode()
    def capture_forward_graphs(self, sizes: Sequence[int], *, seconds: float = math.inf) -> int:
        """See `ForwardGraphs.capture`."""
        return self._forward_graphs.capture(
            sizes, self._forward_packed, self._inputs.padding, seconds=seconds
        )

    def take_swap_timings(self) -> list[tuple[int, float]]:
        """See `KVCache.take_swap_timings`."""
        return self._cache.take_swap_timings()

    def close(self) -> None:
        """Drops the graphs and unpins the CPU blocks; nothing may be under way."""
        self._forward_graphs.close()
        self._graphs.close()
        self._cache.close()

    @torch.inference_mode()
    def profile(self, batch: Batch) -> None:
        """Runs a batch of new requests from end to end, but writes nothing into the cache."""
        for admitted in batch.admitted:
            self._inputs.admit(admitted)
            self._sampler.set(admitted)
        self._sampler.upload()
        step = self._inputs.send(batch)
        inputs = self._inputs.unpack(step.packed, step.shape, step.num_columns)
        inputs.slot_mapping.fill_(-1)
        drawn = DrawnTokens(step.draw.sample_slots.shape[0], self._device)
        logits = self._compute_logits(step.draw, self._forward(inputs))
        self._draw(step.draw, logits, drawn, batch.requests)

    def _forward_packed(self, packed: Tensor, shape: StepShape) -> Tensor:
        return self._forward(self._inputs.unpack(packed, shape))

    def _forward(self, inputs: ModelInputs, prefixes: ops.SharedPrefixes | None = None) -> Tensor:
        """Runs the model; [T, hidden size]."""
        with _full_float32():
            hidden: Tensor = self._model(
                inputs.input_ids, inputs.positions, self._cache.blocks, self._attention(inputs, prefixes)
            )
        return hidden

    def _compute_logits(self, draw: DrawInputs, hidden: Tensor) -> Tensor:
        """The logits of the rows that draw, [S, padded vocabulary]."""
        if draw.sample_rows is not None:
            hidden = hidden.index_select(0, draw.sample_rows)
        with _full_float32():
            return self._model.compute_logits(hidden)

    def _attention(self, inputs: ModelInputs, prefixes: ops.SharedPrefixes | None) -> AttentionBatch:
        num_tokens = inputs.input_ids.shape[0]
        one_each = inputs.max_query_len == 1 and num_tokens == inputs.seq_lens.shape[0]

        def make_plan(window: int) -> ops.AttentionPlan:
            return ops.attention_plan(
                inputs.query_start_loc,
                inputs.seq_lens,
                num_tokens=num_tokens,
                max_query_len=inputs.max_query_len,
                num_heads=self._num_heads,
                num_kv_heads=self._cache.shape.num_kv_heads,
                head_dim=self._config.head_dim,
                block_size=self._cache.shape.block_size,
                sliding_window=window,
                prefixes=None if window else prefixes,
            )

        return AttentionBatch(
            slot_mapping=inputs.slot_mapping,
            block_table=inputs.block_table,
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            plans=PlansOnDemand(make_plan),
            newest_only=one_each and prefixes is None,
            hold=self._hold,
        )
