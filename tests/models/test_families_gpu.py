"""Every family on a GPU: in float32 as on the CPU, in bfloat16 no further from it than transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models.families import CASES, make
from tests.models.harness import load
from tests.models.parity import random_prompts, transformers_logits

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", CASES)
@torch.inference_mode()
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    prompts = random_prompts()
    reference = make(tmp_path, *CASES[name])
    expected = [transformers_logits(reference, prompt) for prompt in prompts]

    for chunk in (None, 7, 1):
        found = load(tmp_path, device="cuda").logits(prompts, chunk=chunk)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=5e-4)

    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    half = half.to("cuda").eval()
    found = load(tmp_path, device="cuda", dtype=torch.bfloat16).logits(prompts, chunk=7)
    # The mean, not the maximum: a router's near tie may fall either way.
    ours = theirs = 0.0
    for prompt, one, other in zip(prompts, found, expected, strict=True):
        reached = half(torch.tensor([prompt], device="cuda"), use_cache=False).logits[0]
        ours += float((one.float().cpu() - other).abs().mean())
        theirs += float((reached.float().cpu() - other).abs().mean())
    assert ours <= 1.5 * theirs + 1e-3
