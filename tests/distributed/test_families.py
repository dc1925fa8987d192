"""Every family on two and four ranks against one: the same logits and greedy tokens, in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagedinfer.distributed.limits import possible_sizes
from pagedinfer.models.model_config import ModelConfig
from pagedinfer.models.registry import FAMILIES, build_model
from pagedinfer.models.weights import checkpoint_tensors
from tests.distributed.rank_pool import RankPool
from tests.distributed.rank_tasks import logits_and_tokens
from tests.models.families import CASES, make
from tests.models.parity import TOLERANCE, random_prompts
from tests.tiny_models import make_llama

PROMPTS = random_prompts((1, 7, 23))
NUM_TOKENS = 6
ODD_VOCABULARY = 323

# Heads and inner sizes that four ranks can share, where those of the parity tests are too few.
CHANGES: dict[str, dict[str, Any]] = {
    "Qwen3": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "OPT": {"hidden_size": 256, "num_attention_heads": 4},
    "GPT-2": {"n_embd": 256, "n_head": 4},
}
FOUR_RANKS = ("Qwen2, tied", "OPT", "GPT-2", "Phi-3, partial", "Gemma 3", "Qwen3-MoE, top 1, some dense")


def check(path: Path, pool: RankPool, prompts: list[list[int]] = PROMPTS, *, most_few_rows: int = 0) -> None:
    task: dict[str, Any] = {"path": str(path), "prompts": prompts, "num_tokens": NUM_TOKENS}
    logits, tokens = logits_and_tokens(**task)
    for found_logits, found_tokens in pool.run(logits_and_tokens, **task, most_few_rows=most_few_rows):
        for one, other in zip(found_logits, logits, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
        assert found_tokens == tokens


def make_case(path: Path, name: str) -> None:
    config_class, options = CASES[name]
    changes = CHANGES.get(name) or CHANGES.get(name.split(",")[0], {})
    make(path, config_class, options | changes | {"vocab_size": ODD_VOCABULARY})


def cases() -> Iterator[Any]:
    """Every case on two and on four ranks; each family's is in the cut at one of them."""
    for name in CASES:
        if name == "Llama, nine heads on three":
            continue  # only three ranks can share them
        for num_ranks in (2, 4):
            # Llama's further cases are of head sizes and rotations, which ranks do not change.
            in_cut = num_ranks == (4 if name in FOUR_RANKS else 2) and not name.startswith("Llama, ")
            yield pytest.param(name, num_ranks, marks=[] if in_cut else pytest.mark.trial)


@pytest.mark.parametrize(("name", "num_ranks"), cases())
def test_the_logits_and_tokens_of_one_rank(
    name: str, num_ranks: int, tmp_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    make_case(tmp_path, name)
    check(tmp_path, rank_pool(num_ranks))


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_fewer_kv_heads_than_ranks(
    num_kv_heads: int, tmp_path: Path, rank_pool: Callable[[int], RankPool]
) -> None:
    make_llama(tmp_path, num_key_value_heads=num_kv_heads, attention_bias=True, mlp_bias=True, vocab_size=9)
    check(tmp_path, rank_pool(4), [[token % 9 for token in prompt] for prompt in PROMPTS])


@pytest.mark.parametrize("name", ["Llama, biases", "Qwen3-MoE"])
def test_few_rows(name: str, tmp_path: Path, rank_pool: Callable[[int], RankPool]) -> None:
    """Ranks decode with the linear layers for few rows too; their sums stay sums over the ranks."""
    make_case(tmp_path, name)
    check(tmp_path, rank_pool(2), most_few_rows=4)


# ---- weights ----


class Ranks:
    """A group that only says who is who, to lay models out with."""

    num_local_ranks = 1
    can_be_captured = False

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("name", CASES)
def test_the_ranks_read_every_element_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Together all of it, and of a matrix that is divided none of it twice, but for replicated KV heads."""
    make_case(tmp_path, name)
    config = ModelConfig.from_pretrained(tmp_path)
    size = possible_sizes(config)[-1]
    assert size > 1
    seen: dict[str, torch.Tensor] = {}
    for rank in range(size):
        group: Any = Ranks(rank, size)
        model = build_model(config, torch.float32, torch.device("meta"), group=group)
        for tensor, stored in checkpoint_tensors(model).items():
            counts = seen.setdefault(tensor, torch.zeros(stored.shape, dtype=torch.int32))
            assert counts.shape == stored.shape
            for piece in stored.pieces:
                assert counts[piece.source].shape == piece.destination.shape
                counts[piece.source] += 1
    for tensor, counts in seen.items():
        assert counts.min() >= 1, tensor
        assert counts.max() in (1, size // config.num_kv_heads, size), tensor
    divided = [tensor for tensor, counts in seen.items() if counts.max() == 1]
    assert any("mlp" in each or "fc1" in each or "experts" in each for each in divided)
    assert any("embed" in each or "wte" in each for each in divided)


def test_every_family_is_tested() -> None:
    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    tested = {mapping[getattr(transformers, config_class).model_type] for config_class, _ in CASES.values()}
    assert tested | {"LlamaForCausalLM"} == set(FAMILIES)
