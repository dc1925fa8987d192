"""A real model, SmolLM2-135M-Instruct, against transformers in fp32."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from pagedinfer import LLM, SamplingParams
from pagedinfer.sample_model import sample_model
from tests.models.parity import transformers_logits

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "中国的首都是",
    "def fibonacci(n):\n    ",
    "Q: How many legs does a spider have?\nA:",
    "Water boils at",
    "The three primary colours are",
    "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.slow
def test_greedy_tokens_are_transformers(device: torch.device) -> None:
    """Eight prompts of 64 tokens. Each token must be the one that transformers would have taken there."""
    try:
        folder = str(sample_model())
    except RuntimeError as error:
        pytest.skip(f"the model cannot be fetched: {error}")
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(folder, dtype="float32", device=device.type, num_gpu_blocks_override=256) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = transformers_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
