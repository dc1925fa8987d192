"""Random models of a few layers, saved as transformers saves them: what the parity tests load.

Every tensor is random, norms and biases included, so that none can be dropped or swapped unnoticed, and
large enough that greedy choices are not near ties.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

PAD, BOS, EOS = 0, 1, 2
VOCAB_SIZE = 320

SPECIALS = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}

_TEXT = (
    "The quick brown fox jumps over the lazy dog, and then the other dog sees the fox in the field. "
    "There is nothing better than a good thing that someone has thought through to the end of it all."
)


def make_llama(path: Path, *, seed: int = 0, shard_size: str = "200KB", **config: Any) -> PreTrainedModel:
    """Saves a random Llama (float32, sharded) and a tokenizer under `path`, and returns the Llama.

    `config` overrides LlamaConfig's arguments, which are those of LLAMA by default.
    """
    return make_model(path, LlamaConfig(**LLAMA | SPECIALS | config), seed=seed, shard_size=shard_size)


def make_model(
    path: Path, config: PreTrainedConfig, *, seed: int = 0, shard_size: str = "200KB"
) -> PreTrainedModel:
    """Saves a random model of `config` (float32, sharded) and a tokenizer under `path`; returns the model.

    Its attention is the eager one: the reference should be the plainest.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    randomize(model, seed)
    model.save_pretrained(path, max_shard_size=shard_size)
    byte_level_tokenizer().save_pretrained(path)
    return model


def randomize(model: PreTrainedModel, seed: int) -> None:
    """Fills every parameter: matrices keep the scale of their input, norms are near their neutral value."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(model.get_input_embeddings().weight)} - {id(model.get_output_embeddings().weight)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise if id(parameter) in embeddings else noise * parameter.shape[-1] ** -0.5)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes, a few merges, and <pad>, <bos>, <eos>: 320 tokens. Encodes any text, adds no specials."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """As Llama 2's: "▁" for spaces, one put before the text, and a token for each byte of what has none."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trained.train_from_iterator([_TEXT], trainers.BpeTrainer(vocab_size=80, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for i, token in enumerate(tokens)},
            [tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = trained.normalizer
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
