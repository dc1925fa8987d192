"""The distribution that tokens are drawn from, spelled out: for `logprobs_mode="processed_logprobs"`."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedinfer import ops
from pagedinfer.sampling_params import GREEDY_TEMPERATURE


def changed_logits(logits: Tensor, slots: Tensor, changes: ops.LogitsChanges | None) -> Tensor:
    """The logits after masks, biases and penalties, as `ops.sample_tokens` changes them.

    Args:
        logits: dtype [num_rows, vocabulary].
        slots: int64 [num_rows].
        changes: None: there are none. Token counts are those before this step's draw.

    Returns:
        float32 [num_rows, vocabulary], a new tensor.
    """
    x = logits.float().clone()
    if changes is None:
        return x
    kinds = changes.kinds[slots][:, None]
    columns = torch.arange(x.shape[1], device=x.device)
    if changes.allowed is not None:
        bits = changes.allowed[slots][:, columns // 32] >> (columns % 32).int() & 1
        x = torch.where((kinds & ops.LogitsChange.MASK != 0) & (bits == 0), -torch.inf, x)
    ids = changes.bias_ids[slots].long()
    used = (ids >= 0) & (ids < x.shape[1]) & (kinds & ops.LogitsChange.BIAS != 0)
    x.scatter_add_(1, torch.where(used, ids, 0), torch.where(used, changes.bias[slots], 0.0))
    if changes.token_counts is None:
        return x
    counts = changes.token_counts[slots][:, : x.shape[1]].int()
    times = counts & 0x7FFF
    penalty = changes.repetition_penalty[slots][:, None]
    penalised = torch.where(x > 0, x / penalty, x * penalty)
    y = torch.where(counts != 0, penalised, x)  # the sign bit says that a token is in the prompt
    y = y - changes.frequency_penalty[slots][:, None] * times
    y = y - changes.presence_penalty[slots][:, None] * (times > 0)
    return torch.where(kinds & ops.LogitsChange.PENALTIES != 0, y, x)


def filtered_logits(
    logits: Tensor,
    slots: Tensor,
    token_ids: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> Tensor:
    """Logits after temperature and filters: -inf for the tokens that are not kept.

    The filters are `ops.sample_tokens`' with sums in float32, so that at the boundary of top-p a token may
    be kept here and not there; the one that was drawn is kept in any case. Greedy rows stay as they are.

    Args:
        logits: float32 [num_rows, vocabulary].
        slots: int64 [num_rows], into the parameters.
        token_ids: int64 [num_rows], what was drawn; -1: nothing.
        temperature, top_k, top_p, min_p: by slot, see `ops.sample_tokens`.
    """
    greedy = (temperature[slots] < GREEDY_TEMPERATURE)[:, None]
    largest = logits.amax(dim=-1, keepdim=True)
    x = (logits - largest) / temperature[slots][:, None].clamp(min=GREEDY_TEMPERATURE)
    ordered, order = x.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(x.shape[1], device=x.device)
    k = top_k[slots][:, None]
    keep = (places < k) | (k <= 0)
    weights = torch.where(keep, ordered.exp(), 0.0)
    p = top_p[slots][:, None]
    before = weights.cumsum(dim=-1) - weights
    keep &= (before < p * weights.sum(dim=-1, keepdim=True)) | (p >= 1)
    keep &= ordered.exp() >= min_p[slots][:, None]
    kept = torch.zeros_like(keep).scatter_(1, order, keep)
    drawn = token_ids.clamp(min=0)[:, None]
    kept.scatter_(1, drawn, torch.ones_like(drawn, dtype=torch.bool))
    return torch.where(greedy, logits, torch.where(kept, x, -torch.inf))
