"""How dimensions are divided: each element once, and heads beside the KV heads that they read."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pagedinfer.distributed.limits import check_tensor_parallel_size, possible_sizes
from pagedinfer.distributed.sharding import fits_heads, shard_evenly, shard_heads, shard_vocabulary
from pagedinfer.models.model_config import ModelConfig


@dataclass(frozen=True)
class Ranks:
    rank: int
    size: int


def all_ranks(size: int) -> list[Ranks]:
    return [Ranks(rank, size) for rank in range(size)]


def test_even_shards_follow_one_another() -> None:
    shards = [shard_evenly(12, ranks) for ranks in all_ranks(4)]
    assert [(shard.start, shard.stop) for shard in shards] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    assert shards[1].times(10) == shard_evenly(120, Ranks(1, 4))


def test_what_is_uneven_is_refused() -> None:
    with pytest.raises(ValueError, match="10 cannot be divided evenly among 4 ranks"):
        shard_evenly(10, Ranks(0, 4))
    with pytest.raises(ValueError, match="12 attention heads on 6 KV heads cannot be divided among 4 ranks"):
        shard_heads(12, 6, Ranks(0, 4))


@pytest.mark.parametrize("heads", [(8, 8), (8, 4), (8, 2), (8, 1), (12, 6), (9, 3), (24, 8)])
def test_query_heads_have_their_kv_heads(heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    sizes = [size for size in range(1, num_heads + 1) if fits_heads(num_heads, num_kv_heads, size)]
    assert sizes[-1] == num_heads
    for size in sizes:
        shards = [shard_heads(num_heads, num_kv_heads, ranks) for ranks in all_ranks(size)]
        heads = [head for shard in shards for head in range(shard.query.start, shard.query.stop)]
        assert heads == list(range(num_heads))
        for shard in shards:
            assert shard.query.size % shard.kv.size == 0
            per_kv_head = shard.query.size // shard.kv.size
            for i, head in enumerate(range(shard.query.start, shard.query.stop)):
                assert shard.kv.start + i // per_kv_head == head * num_kv_heads // num_heads


@pytest.mark.parametrize("vocab_size", [1, 7, 320, 321, 50257])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_token_is_on_one_rank_at_its_column(vocab_size: int, size: int) -> None:
    columns: list[int | None] = []
    for ranks in all_ranks(size):
        tokens, num_rows = shard_vocabulary(vocab_size, ranks)
        columns += [*range(tokens.start, tokens.stop), *[None] * (num_rows - tokens.size)]
    assert columns[:vocab_size] == list(range(vocab_size))
    assert all(column is None for column in columns[vocab_size:])
    assert len(columns) == vocab_size or size > 1


def llama(**changes: int) -> ModelConfig:
    options = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "vocab_size": 321,
    }
    return ModelConfig.from_dict(options | changes)


def test_the_sizes_that_would_work_are_listed() -> None:
    assert possible_sizes(llama()) == [1, 2, 4, 8]
    assert possible_sizes(llama(intermediate_size=100)) == [1, 2, 4]
    assert possible_sizes(llama(num_attention_heads=9, num_key_value_heads=3, head_dim=64)) == [1, 3]
    check_tensor_parallel_size(llama(), 8)
    with pytest.raises(ValueError, match=r"=3 does not .*intermediate_size 96; possible are 1, 2, 4, 8$"):
        check_tensor_parallel_size(llama(), 3)


def test_inner_sizes_of_families_that_name_them_otherwise() -> None:
    gpt2 = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 192,
        "n_head": 3,
        "n_layer": 1,
        "n_positions": 64,
    }
    assert possible_sizes(ModelConfig.from_dict(gpt2)) == [1, 3]
    assert possible_sizes(ModelConfig.from_dict(gpt2 | {"n_inner": 100})) == [1]
