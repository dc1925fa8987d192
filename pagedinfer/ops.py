"""The kernels, as typed Python functions: loads `_kernels.so` and wraps each of its ops.

Every op has a CPU and a CUDA implementation behind one name and takes the one of its tensors' device.
Arguments that are not what an op needs raise ValueError with the expected and the actual shape, dtype,
device or strides. No op synchronises with the host or allocates device memory behind the caller's
back; under CUDA all run on the current stream and can be captured in a graph.

The words used for shapes:

    num_tokens    tokens in the batch, over all sequences (padding included)
    num_seqs      sequences in the batch (padding included)
    kv_cache      one layer's cache, a view [num_blocks, 2, num_kv_heads, block_size, head_dim] of the whole
                  cache [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; in dimension 1,
                  index 0 is K and 1 is V; within a block the view is dense
    slot mapping  for each token, block id * block_size + offset in the block; -1 is padding

`dtype` is float32, float16 or bfloat16, one for all floating-point tensors of a call unless said
otherwise.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace
from enum import IntFlag
from functools import cache

import torch
from torch import Tensor

from pagedinfer.kernel_library import load_kernels

HEAD_DIMS = (64, 80, 96, 112, 128, 256)
BLOCK_SIZES = (8, 16, 32, 64)

_ops = load_kernels()


# ---- attention -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step's batch is cut into pieces of work; made once a step, used by every layer."""

    plan: Tensor
    """int32 [plan length]; its contents are the kernels' own."""
    workspace: Tensor
    """float32 [workspace length]: partial results of sequences that were split along the KV."""
    max_query_len: int
    """The longest query of the batch that the plan may describe; 1: decode only."""
    prefixes: SharedPrefixes | None = None
    """What is read once for several sequences."""
    prefix_results: Tensor | None = None
    """float32 [splits, num_tokens, num_heads, head_dim + 2]: partial results of these prefixes."""


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of sequences whose block tables begin with the same blocks, which are read once for all.

    Sequences start[g] to start[g + 1] - 1 are group g; those from start[-1] on are in none. G: groups.
    """

    start: Tensor
    """int32 [G + 1], ascending from 0."""
    lens: Tensor
    """int32 [G]: the tokens that are read once, a multiple of 64, less than each member has; 0: none."""


def new_attention_plan(
    query_start_loc: Tensor,
    *,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> AttentionPlan:
    """Allocates the buffers of a plan, without filling it, on the device of `query_start_loc`.

    They fit every batch of `query_start_loc.shape[0] - 1` sequences and `num_tokens` tokens in which no
    query is longer than `max_query_len`, whatever the sequences' lengths: a captured CUDA graph can keep
    them.
    """
    plan_length, workspace_length = _ops.attention_plan_sizes(
        query_start_loc, num_tokens, max_query_len, num_heads, num_kv_heads, head_dim, block_size
    )
    device = query_start_loc.device
    return AttentionPlan(
        plan=torch.empty(plan_length, dtype=torch.int32, device=device),
        workspace=torch.empty(workspace_length, dtype=torch.float32, device=device),
        max_query_len=max_query_len,
    )


def attention_plan(
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    num_tokens: int,
    max_query_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    sliding_window: int = 0,
    deterministic: bool = False,
    prefixes: SharedPrefixes | None = None,
    out: AttentionPlan | None = None,
) -> AttentionPlan:
    """Plans a step's attention: splits the batch evenly over the device. All layers share the plan.

    Args:
        query_start_loc: int32 [num_seqs + 1], where each sequence's query tokens begin; ascending, from 0.
        seq_lens: int32 [num_seqs], each sequence's length in tokens, this step's tokens included. 0 is an
            unused row.
        num_tokens: rows of the query tensor; those from `query_start_loc[-1]` on are padding.
        max_query_len: no sequence has more query tokens than this; known on the host.
        num_heads, num_kv_heads, head_dim, block_size: as in `paged_attention`.
        sliding_window: as in `paged_attention`; the layers that share a plan have one window.
        deterministic: split a sequence by its own length alone, so that its result does not depend, to
            the last bit, on the rest of the batch.
        prefixes: what is to be read once for several sequences (cascade attention). Only where each sequence
            has one query token, without a window, and not in deterministic mode. On a GPU not in float32.
            The CPU does not read them apart, and checks that the block tables agree.
        out: buffers from `new_attention_plan` to fill; without it new ones are allocated.

    Raises:
        ValueError: a head_dim or block_size that no kernel was built for (the message lists those that
            are), heads that do not divide, or tensors that do not fit.
    """
    if out is None:
        out = new_attention_plan(
            query_start_loc,
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
        )
    _ops.attention_plan(
        query_start_loc,
        seq_lens,
        out.plan,
        num_tokens,
        max_query_len,
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        sliding_window,
        deterministic,
        None if prefixes is None else prefixes.start,
        None if prefixes is None else prefixes.lens,
    )
    if prefixes is None:
        return out if out.prefixes is None else replace(out, prefixes=None, prefix_results=None)
    results = out.prefix_results
    if results is None:
        splits = _prefix_splits(num_tokens * num_heads // num_kv_heads, num_kv_heads)
        shape = (splits, num_tokens, num_heads, head_dim + 2)
        results = torch.empty(shape, dtype=torch.float32, device=seq_lens.device)
    return replace(out, prefixes=prefixes, prefix_results=results)


def _prefix_splits(num_rows: int, num_kv_heads: int) -> int:
    """In how many parts a prefix's keys are read, so that even one group of few rows keeps a GPU busy.

    Each part adds partial results to be written and read again. 128 rows are a tile; two blocks fit on each
    of 132 multiprocessors.
    """
    num_blocks = -(-num_rows // 128) * num_kv_heads
    return max(1, min(8, 264 // num_blocks))


def paged_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    plan: AttentionPlan,
    *,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of any mix of decode rows and prefill chunks over the paged KV cache.

    Sequence i has queries `query[query_start_loc[i]:query_start_loc[i + 1]]`, the last of its
    `seq_lens[i]` tokens (bottom-right causal): the query at position p sees keys 0..p, or with a window
    w the keys p - w + 1..p. The keys and values of this step must be in the cache already (`store_kv`).

        s = scale * q . k;  with a cap c: s = c * tanh(s / c);  out = softmax(s) v

    Args:
        query: dtype [num_tokens, num_heads, head_dim]; head_dim is contiguous, other strides are free.
        kv_cache: dtype, one layer's view (see the module's docstring). num_heads is a multiple of its
            num_kv_heads; query head h reads KV head h // (num_heads // num_kv_heads).
        block_table: int32 [num_seqs, max_blocks]; entries past a sequence's last block are never read.
        query_start_loc, seq_lens: as in `attention_plan`.
        plan: from `attention_plan` over the same batch.
        scale: factor on the scores, usually head_dim ** -0.5.
        sliding_window: how many keys a query sees, itself included; 0: all.
        logit_cap: soft cap on the scores; 0: none.
        out: dtype [num_tokens, num_heads, head_dim], contiguous; allocated if not given.

    Returns:
        `out`. Padded rows and rows of sequences of length 0 are zeros. Slots of the cache that no
        sequence uses may hold anything, NaN included.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or a head_dim or block_size that
            no kernel was built for (the message lists those that are).

    The online softmax is that of Milakov and Gimelshein (2018), the tiling that of FlashAttention (Dao et
    al., 2022), the split along the KV that of Flash-Decoding (Dao et al., 2023), the paged cache that of
    PagedAttention (Kwon et al., 2023).
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _ops.paged_attention(
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        plan.plan,
        plan.workspace,
        out,
        plan.max_query_len,
        scale,
        sliding_window,
        logit_cap,
        None if plan.prefixes is None else plan.prefixes.start,
        None if plan.prefixes is None else plan.prefixes.lens,
        plan.prefix_results,
    )
    return out


# ---- cache -----------------------------------------------------------------------------------------


def store_kv(key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
    """Writes the keys and values of a step's tokens into one layer's cache.

    Args:
        key, value: dtype [num_tokens, num_kv_heads, head_dim]; head_dim is contiguous, other strides are
            free (a split view of a fused QKV is fine).
        kv_cache: dtype, one layer's view, written in place.
        slot_mapping: int64 [num_tokens], contiguous; -1 writes nothing. No slot may come twice.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; on the CPU also a slot out of
            range (on a GPU nobody looks: it would cost a wait).
    """
    _ops.store_kv(key, value, kv_cache, slot_mapping)


def rotary_store_kv(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    query_norm_weight: Tensor | None = None,
    key_norm_weight: Tensor | None = None,
    epsilon: float = 1e-6,
) -> None:
    """All between a layer's projection and its attention, in one pass: QK-norm, RoPE, the cache.

    Gives what `rms_norm` over the heads of query and key (if there are weights), `rotary_embedding` and
    `store_kv` give one after the other, but leaves key as it is: its rotated heads go to the cache only.

    Args:
        positions: int64 [num_tokens], contiguous; as in `rotary_embedding`.
        query: dtype [num_tokens, num_heads, head_dim], normed and rotated in place; head_dim is
            contiguous, other strides are free (a split view of a fused QKV is fine).
        key, value: dtype [num_tokens, num_kv_heads, head_dim], likewise; only read.
        cos_sin_cache: float32 [max_position, rotary_dim], contiguous; as in `rotary_embedding`.
        kv_cache: dtype, one layer's view, written in place.
        slot_mapping: int64 [num_tokens], contiguous; -1 stores nothing (query is still rotated).
        interleaved: as in `rotary_embedding`.
        query_norm_weight, key_norm_weight: dtype [head_dim], contiguous, or None: no norm.
        epsilon: of the norms, as in `rms_norm`.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, a head_dim above 256, a rotary_dim
            that is odd or larger than head_dim; on the CPU also a slot or a position out of range.
    """
    _ops.rotary_store_kv(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        interleaved,
        query_norm_weight,
        key_norm_weight,
        epsilon,
    )


MAX_ROTARY_ATTENTION_GROUP = 16
"""The most query heads to a KV head for which `rotary_attention` has a kernel on a GPU."""

ROTARY_ATTENTION_HEAD_DIMS = (64, 128)
"""The head_dims for which it has one."""


def rotary_attention(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int = 0,
    logit_cap: float = 0.0,
    query_norm_weight: Tensor | None = None,
    key_norm_weight: Tensor | None = None,
    epsilon: float = 1e-6,
    out: Tensor | None = None,
) -> Tensor:
    """`rotary_store_kv` and `paged_attention` of the newest token of each of few sequences, in one launch.

    Row i of query, key and value is the newest of the seq_lens[i] tokens of sequence i.

    On a GPU all but query, key and value, the earlier tokens in the cache among it, is read before the
    kernels ahead in the stream have ended: none of these that may still be under way may write it. A kernel
    that does not begin early itself, as torch's, is waited for with all before it by the next.

    Args:
        positions: int64 [num_seqs], contiguous; as in `rotary_embedding`.
        query: dtype [num_seqs, num_heads, head_dim], only read; head_dim is contiguous, heads begin at
            multiples of 16 bytes (a split view of a fused QKV is fine). On a GPU fp16 or bf16, a head_dim of
            `ROTARY_ATTENTION_HEAD_DIMS` and at most `MAX_ROTARY_ATTENTION_GROUP` heads to a KV head.
        key, value: dtype [num_seqs, num_kv_heads, head_dim], likewise.
        cos_sin_cache: float32 [max_position, head_dim], contiguous: all of a head is rotated.
        kv_cache: dtype, one layer's view; takes the newest keys and values.
        slot_mapping: int64 [num_seqs], contiguous: where block_table has the newest token; -1 for a sequence
            of length 0.
        block_table: int32 [num_seqs, max_blocks]; as in `paged_attention`.
        seq_lens: int32 [num_seqs], contiguous: tokens of each sequence, the newest included; 0: none, and
            the row of `out` is zeros.
        scale, sliding_window, logit_cap: as in `paged_attention`.
        query_norm_weight, key_norm_weight, epsilon: as in `rotary_store_kv`.
        out: dtype [num_seqs, num_heads, head_dim], contiguous; allocated if not given.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes, devices, alignments or strides that do not fit; on the CPU also lengths,
            positions, slots and block ids that do not.
    """
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    _ops.rotary_attention(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        kv_cache,
        slot_mapping,
        block_table,
        seq_lens,
        out,
        query_norm_weight,
        key_norm_weight,
        epsilon,
        scale,
        sliding_window,
        logit_cap,
    )
    return out


def copy_blocks(kv_cache: Tensor, mapping: Tensor) -> None:
    """Copies whole blocks within a cache: block `mapping[i, 0]` to block `mapping[i, 1]`.

    All copies behave as if every source were read before any destination is written, so chains and
    cycles give what they say.

    Args:
        kv_cache: any dtype, [num_blocks, ...], contiguous: the whole cache, all layers.
        mapping: int64 [n, 2] on the CPU, contiguous; n may be 0.

    Raises:
        ValueError: an id out of range or a destination named twice (nothing is copied then), or tensors
            that do not fit.
    """
    _ops.copy_blocks(kv_cache, mapping)


def swap_blocks(source: Tensor, destination: Tensor, mapping: Tensor) -> None:
    """Copies whole blocks between caches: block `mapping[i, 0]` of one to `mapping[i, 1]` of the other.

    Between a GPU and the CPU the copies are asynchronous on the GPU's current stream; the CPU side must
    be pinned. torch's allocators are told that the stream uses both: either tensor may be dropped at
    once, and its memory is given to nobody else until the stream has passed. (Memory that torch did not
    allocate must be kept by who did.) Neighbouring blocks are merged into one transfer.

    Args:
        source, destination: one dtype, [num_blocks, ...] with equal trailing shapes, contiguous, sharing
            no memory; both on the CPU, both on one GPU, or one on each.
        mapping: int64 [n, 2] on the CPU, contiguous; n may be 0.

    Raises:
        ValueError: an id out of range, a destination named twice, CPU memory that is not pinned beside a
            GPU (nothing is copied then), or tensors that do not fit.
    """
    _ops.swap_blocks(source, destination, mapping)
    if source.device != destination.device and source.numel() and mapping.numel():
        _hold_memory_until_swapped(source, destination, mapping)


def _hold_memory_until_swapped(source: Tensor, destination: Tensor, mapping: Tensor) -> None:
    """Tells torch's allocators that the GPU's current stream uses the memory of both."""
    on_gpu = source if source.is_cuda else destination
    on_gpu.record_stream(torch.cuda.current_stream(on_gpu.device))
    # Pinned memory has no record_stream of its own, but torch's copies record theirs: one element of a
    # block that was just swapped, once more.
    source_block, destination_block = mapping[-1].tolist()
    _first_element(destination, destination_block).copy_(
        _first_element(source, source_block), non_blocking=True
    )


def _first_element(cache: Tensor, block: int) -> Tensor:
    return cache.as_strided((1,), (1,), cache.storage_offset() + block * cache.stride(0))


# ---- sampler ---------------------------------------------------------------------------------------


class LogitsChange(IntFlag):
    """What changes a slot's logits."""

    PENALTIES = 1
    BIAS = 2
    MASK = 4


@dataclass(frozen=True, slots=True)
class LogitsChanges:
    """What changes the logits of some slots before they are sampled. By slot, on the logits' device.

    In this order: tokens that the mask does not allow get -inf; biases are added; the repetition penalty
    divides positive logits and multiplies others, of tokens in the prompt or generated; frequency_penalty
    times the number of times that it was generated, and presence_penalty once, are subtracted from a
    generated token's logit. All in float32, each operation rounded on its own.

    `sample_tokens` counts the token it draws for a slot with penalties. Nothing needs to be uploaded for
    a slot whose parameters stay as they are.
    """

    kinds: Tensor
    """int32 [num_slots], each a `LogitsChange`; rows of slots with 0 are sampled as they are."""
    repetition_penalty: Tensor
    """float32 [num_slots], above 0; 1: off."""
    presence_penalty: Tensor
    """float32 [num_slots]; 0: off."""
    frequency_penalty: Tensor
    """float32 [num_slots]; 0: off."""
    bias_ids: Tensor
    """int32 [num_slots, max_biases], the tokens that have a bias, each once; -1: unused."""
    bias: Tensor
    """float32 [num_slots, max_biases], finite or -inf, which bans the token."""
    token_counts: Tensor | None = None
    """int16 [num_slots, vocabulary or more], kept up to date: how often a token was generated in the low
    15 bits; the sign bit says that it is in the prompt. See `set_token_counts`. None: no slot has
    penalties."""
    allowed: Tensor | None = None
    """int32 [num_slots, vocabulary / 32 or more]: bit i % 32 of word i // 32 is set if token i may be
    drawn. None: no slot has a mask."""


def set_token_counts(token_counts: Tensor, slot: int, prompt_ids: Tensor, generated_ids: Tensor) -> None:
    """Starts a slot's counts for `LogitsChanges`, from what is known of its request.

    Args:
        token_counts: int16 [num_slots, vocabulary or more]; row `slot` is written.
        prompt_ids, generated_ids: int64 [n], on the device of the counts.
    """
    columns = token_counts.shape[1]
    counts = torch.bincount(generated_ids, minlength=columns).clamp_(max=0x7FFF).to(torch.int16)
    counts[prompt_ids] |= -0x8000
    token_counts[slot] = counts


def sample_tokens(
    logits: Tensor,
    slots: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    vocab_size: int | None = None,
    token_ids: Tensor | None = None,
    logprobs: Tensor | None = None,
    workspace: Tensor | None = None,
    changes: LogitsChanges | None = None,
    wants_logprob: Tensor | None = None,
) -> Tensor:
    """Draws one token for each row of logits, each row with the parameters of its slot.

    In this order: temperature, top-k, top-p on the renormalised rest, min-p, the draw. Candidates are
    ordered by falling logit, ties by rising id (a stable sort). Weights are exp((x - max) / temperature)
    by one polynomial that CPU and CUDA share, summed as 64-bit fixed point; so equal logits give equal
    tokens, bit for bit, on either device and in any batch. The random number of a row comes from
    Philox4x32-10 with the slot's seed as key and its position as counter, and from nothing else.
    docs/sampling.md gives the arithmetic in full.

    Args:
        logits: dtype [num_rows, padded vocabulary]; the vocabulary is contiguous, the row stride is free.
        slots: int32 [num_rows], each row's index into the parameters; -1 is padding.
        temperature: float32 [num_slots]; below 1e-5 the row is greedy: argmax, ties to the lowest id.
        top_k: int32 [num_slots]; 0 or less: off.
        top_p: float32 [num_slots] in (0, 1]; 1: off.
        min_p: float32 [num_slots] in [0, 1]; 0: off. Relative to the most likely token.
        seeds: int64 [num_slots], the 64-bit seed of the slot's random stream.
        positions: int64 [num_slots], the index of the token to be generated, from 0.
        vocab_size: ids from this on are never drawn; default: all columns may be.
        token_ids: int64 [num_rows], written; allocated if not given.
        logprobs: float32 [num_rows], written if given: the drawn token's log-probability under
            softmax(logits), before temperature and filters; 0 for padding and where the slot wants none,
            NaN for a row that cannot be sampled.
        workspace: uint8 [sample_tokens_workspace_size(logits, changes=...)]; allocated if not given.
        changes: penalties, biases and masks of some slots; its token_counts are written.
        wants_logprob: bool [num_slots], whose log-probabilities are wanted; default: all. A row that
            wants none is spared a pass.

    Returns:
        `token_ids`: the drawn ids; -1 for padding and for a row that cannot be sampled (one that holds NaN
        or +inf, or nothing but -inf, after the changes).

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    if workspace is None:
        size = sample_tokens_workspace_size(logits, changes=changes is not None)
        workspace = torch.empty(size, dtype=torch.uint8, device=logits.device)
    if token_ids is None:
        token_ids = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    _ops.sample_tokens(
        logits,
        slots,
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        positions,
        logits.shape[-1] if vocab_size is None else vocab_size,
        workspace,
        token_ids,
        logprobs,
        *_tensors_of(changes),
        wants_logprob,
    )
    return token_ids


def _tensors_of(changes: LogitsChanges | None) -> tuple[Tensor | None, ...]:
    """In the order of the op's arguments."""
    if changes is None:
        return (None,) * 8
    return (
        changes.kinds,
        changes.repetition_penalty,
        changes.presence_penalty,
        changes.frequency_penalty,
        changes.token_counts,
        changes.bias_ids,
        changes.bias,
        changes.allowed,
    )


def sample_tokens_workspace_size(logits: Tensor, *, changes: bool = False) -> int:
    """Bytes of workspace that `sample_tokens` needs for logits of this shape, with `changes` or without.

    With changes it is one float32 for each of the logits; without, nothing.
    """
    return int(_ops.sample_tokens_workspace_size(logits, changes))


MAX_TOP_LOGPROBS = 1024


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """What `top_logprobs` finds in each row."""

    logprobs: Tensor
    """float32 [num_rows]: the token's log-probability."""
    ranks: Tensor
    """int64 [num_rows]: the token's place in the order, from 1."""
    top_ids: Tensor
    """int64 [num_rows, num_top]: the first tokens of the order; -1 where no more have a finite logit."""
    top_logprobs: Tensor
    """float32 [num_rows, num_top]: theirs, falling; -inf where there is no token."""


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, vocab_size: int | None = None
) -> TopLogprobs:
    """The log-probability and the rank of one token of each row, and the best tokens of the row.

    Log-probabilities are those of softmax(logits). The order is `sample_tokens`': falling logit, ties by
    rising id; so ranks are unique, and the first of `top_ids` is what greedy sampling takes.

    Args:
        logits: dtype [num_rows, padded vocabulary]; the vocabulary is contiguous, the row stride is free.
        token_ids: int64 [num_rows]. A row whose token is not in the vocabulary, -1 for instance, is
            skipped: it gets NaN, rank 0 and ids of -1. So does a row that holds NaN or +inf, or nothing
            but -inf.
        num_top: how many of the best tokens; 0 to `MAX_TOP_LOGPROBS`.
        vocab_size: columns from this on do not exist; default: all do.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    if num_top < 0:
        raise ValueError(f"top_logprobs: num_top is {num_top}; expected 0 to {MAX_TOP_LOGPROBS}")
    rows, device = logits.shape[:1], logits.device
    out = TopLogprobs(
        logprobs=torch.empty(rows, dtype=torch.float32, device=device),
        ranks=torch.empty(rows, dtype=torch.int64, device=device),
        top_ids=torch.empty((*rows, num_top), dtype=torch.int64, device=device),
        top_logprobs=torch.empty((*rows, num_top), dtype=torch.float32, device=device),
    )
    _ops.top_logprobs(
        logits,
        token_ids,
        logits.shape[-1] if vocab_size is None else vocab_size,
        out.logprobs,
        out.ranks,
        out.top_ids,
        out.top_logprobs,
    )
    return out


# ---- layers ----------------------------------------------------------------------------------------


def rms_norm(
    input: Tensor,
    weight: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019): x / sqrt(mean(x^2) + epsilon) * weight, along the last dimension.

    Args:
        input: dtype [..., hidden]; the last dimension is contiguous, those before the last two have one
            stride (the heads of a split view of a fused QKV are fine, for QK-norm).
        weight: dtype [hidden].
        epsilon: added to the mean of squares; finite and not negative.
        residual: dtype, input's shape, strides as input's. If given, it is updated in place,
            residual += input, and x is that sum; without it x is the input.
        out: dtype, input's shape, strides as input's; allocated contiguous if not given. May be the input
            itself.

    Returns:
        `out`. Arithmetic is in float32; a half type is rounded to where a model of torch operations
        rounds: the sum of residual and input, the normalised value, and its product with the weight.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or a residual that shares its
            memory with input or out.
    """
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    _ops.rms_norm(input, weight, epsilon, out, residual)
    return out


def offset_rms_norm(
    input: Tensor, weight: Tensor, epsilon: float, addend: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """RMSNorm as Gemma has it: input / sqrt(mean(input^2) + epsilon) * (1 + weight), plus an addend.

    Args:
        input: dtype [..., hidden]; the last dimension is contiguous, those before the last two have one
            stride.
        weight: dtype [hidden], contiguous: the distance of each factor from one.
        epsilon: added to the mean of squares; finite and not negative.
        addend: dtype [..., hidden], strides as input's: what the norm is added to.
        out: dtype [..., hidden], strides as input's; may be the addend; allocated contiguous if not given.

    Returns:
        `out`. Arithmetic is in float32; a half type is rounded to after the norm and after the sum.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    if out is None:
        out = torch.empty(input.shape, dtype=input.dtype, device=input.device)
    _ops.offset_rms_norm(input, weight, epsilon, out, addend)
    return out


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Rotates query and key in place (RoPE: Su et al., 2021).

    With angles a_i at a token's position, for i in 0..rotary_dim / 2 - 1 the pair (x, y) becomes
    (x cos a_i - y sin a_i, y cos a_i + x sin a_i). The pair is elements (i, i + rotary_dim / 2) of a head,
    or (2i, 2i + 1) if interleaved. Elements from rotary_dim on stay as they are.

    Args:
        positions: int64 [num_tokens]; a position outside the table leaves its token unrotated on the GPU
            and is a ValueError on the CPU.
        query: dtype [num_tokens, num_heads, head_dim]; head_dim is contiguous, other strides are free.
        key: dtype [num_tokens, num_kv_heads, head_dim], likewise, or None.
        cos_sin_cache: float32 [max_position, rotary_dim], contiguous: cosines of the angles in the left
            half of a row, sines in the right.
        interleaved: GPT-J's pairs instead of GPT-NeoX's.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, a rotary_dim that is odd or larger
            than head_dim; on the CPU also a position outside the table.
    """
    _ops.rotary_embedding(positions, query, key, cos_sin_cache, interleaved)


def silu_and_mul(input: Tensor, out: Tensor | None = None) -> Tensor:
    """SwiGLU's product (Shazeer, 2020): silu(input[..., :n]) * input[..., n:], where n is half the width.

    Args:
        input: dtype [..., 2 * n]; the last dimension is contiguous, those before the last two have one
            stride.
        out: dtype [..., n], strides as input's; allocated contiguous if not given.

    Returns:
        `out`. Arithmetic is in float32; a half type is rounded to where a model of torch operations
        rounds: after silu and after the product.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or an odd width.
    """
    if out is None:
        out = torch.empty((*input.shape[:-1], input.shape[-1] // 2), dtype=input.dtype, device=input.device)
    _ops.silu_and_mul(input, out)
    return out


MAX_SKINNY_ROWS = 4
"""The most rows that `skinny_linear` takes."""


def skinny_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm_weight: Tensor | None = None,
    epsilon: float = 0.0,
    gated: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A linear layer over few rows, with what stands around it in a decoder layer: input @ weight^T + bias.

    With `norm_weight` the input is `rms_norm`ed first; with `gated` the result is `silu_and_mul`ed; with
    `residual` it is added to that. Rounded where those ops round.

    On a GPU weight, bias and norm_weight are read before the kernels ahead in the stream have ended, so
    that the memory never rests: they must not be written by any that may still be under way, as weights are
    not.

    Args:
        input: dtype [num_rows, in_features], at most `MAX_SKINNY_ROWS` rows; rows begin at multiples of 16
            bytes.
        weight: dtype [features, in_features], contiguous, rows at multiples of 16 bytes too. If gated, the
            gate's rows come first, then as many of the other factor.
        bias: dtype [features].
        norm_weight: dtype [in_features].
        epsilon: of the norm, as in `rms_norm`.
        residual: dtype [num_rows, out_features].
        out: dtype [num_rows, out_features]: features or, if gated, half of them; allocated if not given.
            May be the residual.

    Returns:
        `out`.

    Raises:
        ValueError: shapes, dtypes, devices, alignments or strides that do not fit, or an out or residual
            that shares its memory with the input.
    """
    if out is None:
        features = weight.shape[0] // (2 if gated else 1) if weight.dim() else 0  # which it refuses
        out = torch.empty((*input.shape[:1], features), dtype=input.dtype, device=input.device)
    _ops.skinny_linear(input, weight, bias, norm_weight, epsilon, gated, residual, out)
    return out


MAX_DECODE_ROWS = 128
"""The most rows that `decode_linear` takes."""


def decode_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """input @ weight^T + bias, `silu_and_mul`ed if `gated`: a linear layer over a step of decodes.

    For GPUs of compute capability 9.0, where it multiplies through wgmma. The weight is read before the
    kernels ahead in the stream have ended, so that the memory never rests: it must not be written by any that
    may still be under way, as weights are not. Calls on one stream, those in graphs captured there included,
    share counters in the GPU's memory, and so must not run at the same time.

    Args:
        input: float16 or bfloat16 [num_rows, in_features], at most `MAX_DECODE_ROWS` rows; rows begin at
            multiples of 16 bytes.
        weight: dtype [features, in_features], contiguous, rows at multiples of 16 bytes too; an even number
            of features. If gated a multiple of 16: the gate's, then as many of the other factor.
        bias: dtype [features].
        out: dtype [num_rows, out_features]: features or, if gated, half of them; rows at multiples of 4
            bytes; allocated if not given. Shares no memory with the others.

    Returns:
        `out`. Sums are in float32, rounded where a product and `silu_and_mul` round. A row's result does not
        depend, to the last bit, on what is in the other rows; it may on how many there are.

    Raises:
        ValueError: shapes, dtypes, devices, alignments or strides that do not fit, or a GPU that the kernel
            is not for.
    """
    if out is None:
        features = weight.shape[0] // (2 if gated else 1) if weight.dim() else 0  # which it refuses
        out = torch.empty((*input.shape[:1], features), dtype=input.dtype, device=input.device)
    size = int(_ops.decode_linear_workspace_size(input, weight, gated))
    workspace = torch.empty(size, dtype=torch.float32, device=input.device)
    _ops.decode_linear(input, weight, bias, gated, _queue_of_stream(input.device), workspace, out)
    return out


_QUEUES = 256  # kDecodeLinearQueues in csrc/layers/decode_linear.h


def _queue_of_stream(device: torch.device) -> int:
    """Which counters a call on the current stream uses: each of a device's streams its own, up to _QUEUES."""
    if device.type != "cuda":
        return 0
    return _numbers_of_streams(device)[torch.cuda.current_stream(device).cuda_stream] % _QUEUES


@cache
def _numbers_of_streams(device: torch.device) -> defaultdict[int, int]:
    return defaultdict(itertools.count().__next__)


@cache
def half_linear_pays(dtype: torch.dtype) -> bool:
    """Whether `half_linear` is the quicker way to multiply by weights of a half type on this CPU.

    So it is where the CPU has no arithmetic in that type (AVX512_BF16, AVX512_FP16, AMX): torch's own way of
    converting is several times slower there than float32.
    """
    return bool(_ops.half_linear_pays(torch.empty(0, dtype=dtype)))


def half_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """input . weight^T + bias in float16 or bfloat16, on a CPU that has no arithmetic in it.

    Args:
        input: dtype [..., in_features]; the last dimension is contiguous, those before the last two have one
            stride.
        weight: dtype [out_features, in_features]; the last dimension is contiguous.
        bias: dtype [out_features], contiguous.
        out: dtype [..., out_features], strides as input's; allocated contiguous if not given.

    Returns:
        `out`. Products and sums are in float32, rounded to the dtype once. A row's result does not depend, to
        the last bit, on the other rows or on the number of threads.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, float32, or tensors that are not on the CPU.
    """
    if out is None:
        out = torch.empty((*input.shape[:-1], *weight.shape[:1]), dtype=input.dtype, device=input.device)
    _ops.half_linear(input, weight, bias, out)
    return out


# ---- runner ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What `decode_inputs` makes."""

    input_ids: Tensor
    """int64 [num_rows]; 0 for padding."""
    positions: Tensor
    """int64 [num_rows]; 0 for padding."""
    slot_mapping: Tensor
    """int64 [num_rows]: where in the cache the token's K and V go; -1 for padding."""
    block_table: Tensor
    """int32 [num_rows, num_columns]: the blocks in use; what is behind them means nothing."""


def decode_inputs(
    packed: Tensor,
    *,
    last_tokens: Tensor,
    num_prompt_tokens: Tensor,
    block_table: Tensor,
    output_positions: Tensor,
    block_size: int,
) -> DecodeInputs:
    """The inputs of a step in which every request computes the token that it drew last.

    Made from the state of the slots, which is brought up to date: a new block is written into its slot's
    block table, at the place of the sequence's last token, and the index of the token to be drawn into
    `output_positions`.

    Args:
        packed: int32 [3, num_rows]: slots, -1 for padding; lengths of the sequences with this step's token;
            new blocks, -1 for none. A slot stands there once.
        last_tokens: int64 [num_slots].
        num_prompt_tokens: int64 [num_slots].
        block_table: int32 [num_slots, num_columns], written.
        output_positions: int64 [num_slots], written.
        block_size: tokens of a block.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; on the CPU also slots and lengths
            out of range.
    """
    num_rows, device = packed.shape[1], packed.device
    longs = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    out = DecodeInputs(longs[0], longs[1], longs[2], packed.new_empty((num_rows, block_table.shape[1])))
    _ops.decode_inputs(
        packed,
        last_tokens,
        num_prompt_tokens,
        block_size,
        block_table,
        output_positions,
        out.input_ids,
        out.positions,
        out.slot_mapping,
        out.block_table,
    )
    return out


def keep_tokens(slots: Tensor, token_ids: Tensor, last_tokens: Tensor) -> None:
    """Keeps what a step drew as the next one's input: last_tokens[slots[i]] = token_ids[i].

    Args:
        slots: int32 [num_rows], each at most once; -1 is padding, whose token is dropped.
        token_ids: int64 [num_rows]; -1, of a row that could not be sampled, is kept as 0.
        last_tokens: int64 [num_slots], written.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; on the CPU also slots out of range.
    """
    _ops.keep_tokens(slots, token_ids, last_tokens)


def read_ring(ring: Tensor, turn: Tensor, out: Tensor) -> None:
    """What a step is given by the host: out = ring[turn % num_places, :size].

    The step finds its place in the ring by itself, in a CUDA graph too, and the host starts no copy.

    Args:
        ring: int32 [num_places, width], contiguous, on the CPU; pinned if the others are on a GPU.
        turn: int64 [1], how many steps have ended; >= 0, which is checked on the CPU only.
        out: int32 [size], at most `width`, contiguous, on the device of `turn`; written.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit, or memory that is not pinned.
    """
    _ops.read_ring(ring, turn, out)


def write_ring(values: Tensor, turn: Tensor, ring: Tensor) -> None:
    """What a step gives the host, at its end: ring[turn % num_places, :size] = values, and then turn += 1.

    Args:
        values: int32 [size], at most `width`, contiguous, on the device of `turn`.
        turn: int64 [1], as in `read_ring`; written.
        ring: int32 [num_places, width], contiguous, on the CPU; pinned if the others are on a GPU; written.

    Raises:
        ValueError: as `read_ring`.
    """
    _ops.write_ring(values, turn, ring)


def hold_while(flag: Tensor, microseconds: int) -> None:
    """Holds up the stream while flag[0] is not 0, but no longer than so many microseconds.

    For work on another stream, which sets the flag when it begins and clears it at its end, to go first. On
    the CPU ops run one after another, and nothing is waited for.

    Args:
        flag: int32 [1].

    Raises:
        ValueError: another shape or dtype, or a negative time.
    """
    _ops.hold_while(flag, microseconds)


# ---- distributed -----------------------------------------------------------------------------------

NUMBERS_OF_PEERS = (1, 2, 4, 8)
"""The numbers of ranks that `peer_all_reduce` takes."""

PEER_HEADER_BYTES = 8192
"""At the beginning of each rank's memory: flags and call numbers; as csrc/distributed/peer_all_reduce.h."""

MOST_PUSHED_BYTES = 256 << 10
"""Tensors up to this size are sent to the other GPUs, twice their size; larger ones are read by them."""


def peer_memory_bytes(max_bytes: int) -> int:
    """Bytes of memory that a rank needs for `peer_all_reduce` of tensors up to `max_bytes`.

    Two calls of each way have room: data that the others read, and what each of them pushes.
    """
    return PEER_HEADER_BYTES + 2 * max_bytes + 2 * NUMBERS_OF_PEERS[-1] * 2 * MOST_PUSHED_BYTES


def peer_all_reduce(data: Tensor, memories: Tensor, rank: int, max_bytes: int) -> None:
    """Sums `data` over ranks that can read each other's memory, in place. All ranks must call it.

    It waits for the others, on a GPU in the kernel. The sum is in float32, in the order of the ranks, so all
    get the same bits. Each rank's calls must be in order: one stream, and graphs that are replayed on it.

    Args:
        data: dtype, contiguous; its bytes a multiple of 16, at most `max_bytes`, and the same on all ranks.
        memories: int64 [num_ranks] on the CPU, 1, 2, 4 or 8: the addresses here of the ranks' memories, each
            of `peer_memory_bytes(max_bytes)` bytes, zeros before the first call of any rank.
        rank: this one's place in them.
        max_bytes: a multiple of 16, the same in all calls.

    Raises:
        ValueError: shapes, dtypes, devices or sizes that do not fit.
    """
    _ops.peer_all_reduce(data, memories, rank, max_bytes)


def peer_all_reduce_norm(
    data: Tensor,
    residual: Tensor,
    weight: Tensor,
    epsilon: float,
    memories: Tensor,
    rank: int,
    max_bytes: int,
) -> None:
    """`peer_all_reduce` of `data`, and then `rms_norm` of it with a residual, all in place and in one pass.

    Args:
        data: dtype [num_rows, hidden]; becomes the normalised rows.
        residual: dtype [num_rows, hidden], contiguous; the sum is added to it.
        weight: dtype [hidden], contiguous.
        epsilon: as in `rms_norm`.
        memories, rank, max_bytes: as in `peer_all_reduce`, of whose calls this is one.

    Raises:
        ValueError: as `peer_all_reduce`.
    """
    _ops.peer_all_reduce_norm(data, residual, weight, epsilon, memories, rank, max_bytes)


# ---- mixtures of experts -----------------------------------------------------------------------------


MOST_EXPERTS = 512
"""Experts of a layer that `route_experts` takes."""
MOST_EXPERTS_OF_A_TOKEN = 32


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """Which experts the tokens of a step go to, and the work that follows; made by `route_experts`.

    A pair is a token and one of its experts; it has the number token * k + rank.
    """

    weights: Tensor
    """float32 [num_tokens, k]"""
    experts: Tensor
    """int32 [num_tokens, k]: the best first."""
    pairs: Tensor
    """int32 [num_tokens * k]: the pairs of expert 0, then those of 1, ...; in any order within an expert."""
    tiles: Tensor
    """int32 [most tiles, 3]: expert, begin and end of a stretch of `pairs` that it has; expert -1: none."""
    block_rows: int
    """The most pairs in a tile: 16 or 64."""


def route_experts(scores: Tensor, k: int, *, renormalize: bool, block_rows: int = 16) -> ExpertRouting:
    """The k best experts of each token by softmax of the router's scores (Shazeer et al., 2017).

    Args:
        scores: dtype [num_tokens, num_experts]; the last dimension is contiguous. At most 512 experts.
        k: experts a token, at most 32.
        renormalize: make the weights of a token sum to one.
        block_rows: the most pairs in a tile. 16 suits few pairs an expert, 64 many.

    Returns:
        The routing. Softmax is in float32 over all experts; of equal scores the lower expert is first.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or a k or a number of experts out of range.
    """
    num_tokens, num_experts = scores.shape
    num_pairs = num_tokens * k
    num_tiles = min(num_pairs, num_experts + num_pairs // block_rows)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=scores.device)

    routing = ExpertRouting(
        weights=torch.empty((num_tokens, k), dtype=torch.float32, device=scores.device),
        experts=ints(num_tokens, k),
        pairs=ints(num_pairs),
        tiles=ints(num_tiles, 3),
        block_rows=block_rows,
    )
    _ops.route_experts(
        scores, block_rows, renormalize, routing.weights, routing.experts, routing.pairs, routing.tiles
    )
    return routing


def expert_mlp(hidden: Tensor, gate_up: Tensor, down: Tensor, routing: ExpertRouting) -> Tensor:
    """Each token's experts, gated MLPs with SiLU, and the weighted sum of what they give.

    Three ops: the projections of all experts are one launch each, whose size does not depend on the
    routing, and so can be captured in a CUDA graph.

    Args:
        hidden: dtype [num_tokens, hidden], contiguous.
        gate_up: dtype [num_experts, 2 * inner, hidden], contiguous: the gate's rows, then the other's.
        down: dtype [num_experts, hidden, inner], contiguous.
        routing: of these tokens to these experts.

    Returns:
        dtype [num_tokens, hidden]. Sums are in float32; a half type is rounded to after each projection,
        after silu and its product, and at the end.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit; on the GPU also float32, or sizes
            that are no multiples of 8.
    """
    num_pairs, k = routing.pairs.shape[0], routing.experts.shape[1]
    inner = torch.empty((num_pairs, down.shape[2]), dtype=hidden.dtype, device=hidden.device)
    _ops.expert_gate_up(hidden, gate_up, routing.pairs, routing.tiles, routing.block_rows, k, inner)
    results = torch.empty((num_pairs, hidden.shape[1]), dtype=hidden.dtype, device=hidden.device)
    _ops.expert_down(inner, down, routing.pairs, routing.tiles, routing.block_rows, results)
    out = torch.empty_like(hidden)
    _ops.sum_experts(results, routing.weights, out)
    return out


# ---- fakes: what the ops return, for torch.compile and opcheck --------------------------------------


def _register_fakes() -> None:
    for name in (
        "attention_plan",
        "paged_attention",
        "store_kv",
        "rotary_attention",
        "rotary_store_kv",
        "copy_blocks",
        "swap_blocks",
        "sample_tokens",
        "top_logprobs",
        "rms_norm",
        "offset_rms_norm",
        "rotary_embedding",
        "silu_and_mul",
        "skinny_linear",
        "decode_linear",
        "half_linear",
        "decode_inputs",
        "keep_tokens",
        "read_ring",
        "write_ring",
        "hold_while",
        "peer_all_reduce",
        "peer_all_reduce_norm",
        "route_experts",
        "expert_gate_up",
        "expert_down",
        "sum_experts",
    ):
        # These only write into their arguments; shapes are checked when the op runs.
        torch.library.register_fake(f"pagedinfer::{name}", lambda *args, **kwargs: None)


_register_fakes()
