"""A real model, SmolLM2-135M-Instruct, against transformers in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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


def smollm2() -> str:
    """The model's folder; skips the test if it cannot be had."""
    try:
        return str(sample_model())
    except RuntimeError as error:
        pytest.skip(f"the model cannot be fetched: {error}")


@pytest.mark.slow
def test_greedy_tokens_are_transformers(device: torch.device) -> None:
    """Eight prompts of 64 tokens. Each token must be the one that transformers would have taken there."""
    folder = smollm2()
    greedy = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM(folder, dtype="float32", device=device.type, num_gpu_blocks_override=256) as llm:
        outputs = llm.generate(PROMPTS, greedy, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        logits = transformers_logits(reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


CHATS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_chat_gives_transformers_text(kind: str, tmp_path: Path) -> None:
    """From a folder, and from a GGUF file of it in bfloat16, tokenizer and template included."""
    folder = smollm2()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model = folder
    if kind == "gguf":
        pytest.importorskip("gguf")
        from tests.models.gguf_files import Q, write_gguf

        model = str(tmp_path / "smollm2.gguf")
        write_gguf(Path(model), reference, Q.BF16, tokenizer=Path(folder))
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    with LLM(model, dtype="float32", device="cpu", num_gpu_blocks_override=64) as llm:
        outputs = llm.chat(CHATS, greedy, use_tqdm=False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for chat, output in zip(CHATS, outputs, strict=True):
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = reference.generate(**prompt, max_new_tokens=40, do_sample=False)[
            0, prompt.input_ids.shape[1] :
        ]
        assert output.prompt_token_ids == prompt.input_ids[0].tolist()
        assert output.outputs[0].text == tokenizer.decode(tokens, skip_special_tokens=True)
