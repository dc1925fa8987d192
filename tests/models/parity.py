"""What every family's test asks: that its logits and greedy tokens are transformers'."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.models.harness import PagedModel, load
from tests.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4
LENGTHS = (1, 5, 16, 33, 70)


def random_prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


@torch.inference_mode()
def transformers_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """[len(prompt), vocab]"""
    return model(torch.tensor([prompt]), use_cache=False).logits[0]


def check_greedy(reference: PreTrainedModel, prompt: list[int], tokens: list[int]) -> None:
    """`tokens` are what `reference` goes on with: each is its choice after those before it, so all are."""
    logits = transformers_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def check_logits(model: PagedModel, reference: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Prompts of mixed lengths in one batch: prefill at once, in chunks, and token by token."""
    expected = [transformers_logits(reference, prompt) for prompt in prompts]
    for chunk, block_size in ((None, 16), (7, 8), (1, 32)):
        found = model.logits(prompts, chunk=chunk, block_size=block_size)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)


def check_parity(path: Path, reference: PreTrainedModel, *, num_tokens: int = 32) -> None:
    """Logits and greedy tokens of the model saved under `path` equal those of `reference`."""
    model = load(path)
    prompts = random_prompts()
    check_logits(model, reference, prompts)
    for prompt, tokens in zip(prompts, model.greedy(prompts, num_tokens), strict=True):
        check_greedy(reference, prompt, tokens)


@torch.inference_mode()
def check_half(path: Path, reference: PreTrainedModel, dtype: torch.dtype, device: str = "cpu") -> None:
    """In a half type the model is no further from `reference`, in float32, than transformers is."""
    prompts = random_prompts()
    half = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    half = half.to(device).eval()
    found = load(path, device=device, dtype=dtype).logits(prompts, chunk=7)
    # The mean, not the maximum: a router's near tie may fall either way.
    ours = theirs = 0.0
    for prompt, one in zip(prompts, found, strict=True):
        expected = transformers_logits(reference, prompt)
        reached = half(torch.tensor([prompt], device=device), use_cache=False).logits[0]
        ours += float((one.float().cpu() - expected).abs().mean())
        theirs += float((reached.float().cpu() - expected).abs().mean())
    assert ours <= 1.5 * theirs + 1e-3
