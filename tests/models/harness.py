"""Runs a model over the paged cache without an engine: prefill in chunks, mixed batches, decode.

Blocks are scattered over the cache, unused slots hold NaN and table tails hold huge ids, so that nothing but
a sequence's own tokens can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.distributed.group import SINGLE_RANK, Group
from pagedinfer.distributed.sharding import shard_heads
from pagedinfer.layers import few_rows
from pagedinfer.layers.attention import AttentionBatch
from pagedinfer.models.causal_lm import CausalLM
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import build_model
from pagedinfer.models.weights import load_weights


def load(
    path: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    group: Group = SINGLE_RANK,
) -> PagedModel:
    """The model in a folder, ready to run."""
    config = ModelConfig.from_pretrained(path)
    model = build_model(config, dtype, torch.device(device), group=group)
    load_weights(model, path, use_tqdm=False)
    return PagedModel(model, config, torch.device(device), dtype, group)


@contextmanager
def few_rows_served(most: int = few_rows.MAX_ROWS_NARROW) -> Iterator[list[int]]:
    """Up to `most` rows take the layers for few rows whatever the device and dtype, of any width.

    The list gets the number of rows of each input that takes them; with `most` 0 none does.
    """
    served: list[int] = []

    def by_rows(input: Tensor) -> bool:
        if input.shape[0] > most:
            return False
        served.append(input.shape[0])
        return True

    with (
        mock.patch.object(few_rows, "served", by_rows),
        mock.patch.object(few_rows, "have_kernels", return_value=most > 0),
    ):
        yield served


class PagedModel:
    """A model with the steps that an engine would run."""

    def __init__(
        self,
        model: CausalLM,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        group: Group = SINGLE_RANK,
    ) -> None:
        self.model, self.config, self.device, self.dtype = model, config, device, dtype
        heads = shard_heads(config.num_heads, config.num_kv_heads, group)
        self.num_heads, self.num_kv_heads = heads.query.size, heads.kv.size

    @torch.inference_mode()
    def logits(
        self,
        prompts: list[list[int]],
        *,
        chunk: int | None = None,
        block_size: int = 16,
        seed: int = 0,
    ) -> list[Tensor]:
        """The logits [len(prompt), vocab] of each prompt, all computed together, `chunk` tokens at a time.

        Sequences advance at different paces: each has as many tokens in a step as are left of it, up to
        `chunk`, and one that has no more drops out of the batch. A chunk of 1 is decoding.
        """
        cache, tables = self._cache(prompts, block_size, seed)
        rows: list[list[Tensor]] = [[] for _ in prompts]
        done = [0] * len(prompts)
        while any(done[i] < len(prompt) for i, prompt in enumerate(prompts)):
            counts = [min(chunk or len(p), len(p) - done[i]) for i, p in enumerate(prompts)]
            hidden = self._step(prompts, done, counts, cache, tables, block_size)
            logits = self._compute_logits(hidden).split(counts)
            for i, count in enumerate(counts):
                rows[i].append(logits[i])
                done[i] += count
        return [torch.cat(parts) for parts in rows]

    @torch.inference_mode()
    def greedy(self, prompts: list[list[int]], num_tokens: int, *, block_size: int = 16) -> list[list[int]]:
        """What each prompt goes on with: prefill at once, then decode all together."""
        longest = [prompt + [0] * num_tokens for prompt in prompts]
        cache, tables = self._cache(longest, block_size, seed=0)
        tokens = [list(prompt) for prompt in prompts]
        done = [0] * len(prompts)
        for _ in range(num_tokens):
            counts = [len(tokens[i]) - done[i] for i in range(len(tokens))]
            hidden = self._step(tokens, done, counts, cache, tables, block_size)
            last = torch.tensor(counts, device=self.device).cumsum(0) - 1
            drawn = self._compute_logits(hidden[last]).argmax(-1).tolist()
            for i, token in enumerate(drawn):
                done[i] = len(tokens[i])
                tokens[i].append(token)
        return [tokens[i][len(prompt) :] for i, prompt in enumerate(prompts)]

    def _compute_logits(self, hidden: Tensor) -> Tensor:
        return self.model.compute_logits(hidden)[:, : self.config.vocab_size]

    def _cache(
        self, sequences: list[list[int]], block_size: int, seed: int
    ) -> tuple[Tensor, list[list[int]]]:
        config = self.config
        counts = [-(-len(sequence) // block_size) for sequence in sequences]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, config.num_layers, 2, self.num_kv_heads, block_size, config.head_dim)
        cache = torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)
        blocks = iter(np.random.default_rng(seed).permutation(num_blocks).tolist())
        return cache, [[next(blocks) for _ in range(count)] for count in counts]

    def _step(
        self,
        tokens: list[list[int]],
        done: list[int],
        counts: list[int],
        cache: Tensor,
        tables: list[list[int]],
        block_size: int,
    ) -> Tensor:
        input_ids, positions, slots = [], [], []
        for i, count in enumerate(counts):
            for position in range(done[i], done[i] + count):
                input_ids.append(tokens[i][position])
                positions.append(position)
                slots.append(tables[i][position // block_size] * block_size + position % block_size)
        width = max(map(len, tables))
        seq_lens = [done[i] + count if count else 0 for i, count in enumerate(counts)]
        table = [row + [2**31 - 1] * (width - len(row)) for row in tables]
        start_loc = [0, *np.cumsum(counts).tolist()]

        def tensor(values: object, dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        query_start_loc, lengths = tensor(start_loc, torch.int32), tensor(seq_lens, torch.int32)
        plans = {
            window: ops.attention_plan(
                query_start_loc,
                lengths,
                num_tokens=len(input_ids),
                max_query_len=max(counts),
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.config.head_dim,
                block_size=block_size,
                sliding_window=window,
            )
            for window in self.config.sliding_windows
        }
        batch = AttentionBatch(
            slot_mapping=tensor(slots, torch.int64),
            block_table=tensor(table, torch.int32),
            query_start_loc=query_start_loc,
            seq_lens=lengths,
            plans=plans,
            newest_only=all(count == 1 for count in counts),
        )
        hidden: Tensor = self.model(
            tensor(input_ids, torch.int64), tensor(positions, torch.int64), cache, batch
        )
        return hidden
