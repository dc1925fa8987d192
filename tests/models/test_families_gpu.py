"""Every family on a GPU: in float32 as on the CPU, in bfloat16 no further from it than transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models.families import CASES, make
from tests.models.harness import load
from tests.models.parity import check_half, random_prompts, transformers_logits

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

    check_half(tmp_path, reference, torch.bfloat16, "cuda")
