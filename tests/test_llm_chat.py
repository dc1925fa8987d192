"""LLM.chat: messages through the template, answers as generate gives them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagedinfer import LLM, SamplingParams
from tests.conftest import TinyModel

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
CHATS = [[{"role": "user", "content": "Hi"}], [{"role": "user", "content": "中"}]]


@pytest.fixture(scope="module")
def llm(tiny_llama: TinyModel) -> Iterator[LLM]:
    with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64, max_num_seqs=4) as llm:
        yield llm


def test_equals_generate_with_the_rendered_prompt(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    outputs = llm.chat(CHATS, GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    for chat, output in zip(CHATS, outputs, strict=True):
        token_ids = tokenizer.apply_chat_template(
            chat, chat_template=TEMPLATE, add_generation_prompt=True, return_dict=False
        )
        assert output.prompt_token_ids == token_ids
        assert token_ids.count(tokenizer.bos_token_id) == 1
        assert output.prompt == tokenizer.decode(token_ids)
        [expected] = llm.generate({"prompt_token_ids": token_ids}, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        assert output.outputs[0].text == expected.outputs[0].text


def test_one_chat_gives_one_output(llm: LLM) -> None:
    [output] = llm.chat(CHATS[0], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert output.finished


def test_a_model_without_a_template_can_still_generate(llm: LLM) -> None:
    with pytest.raises(ValueError, match="no chat template: give one as chat_template"):
        llm.chat(CHATS[0], GREEDY, use_tqdm=False)
    assert llm.generate("Hi", GREEDY, use_tqdm=False)[0].finished


def test_template_given_with_the_model(llm: LLM, tiny_llama: TinyModel, tmp_path: Path) -> None:
    """As text or as a file; the call's own goes before it."""
    [expected] = llm.chat(CHATS[0], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    file = tmp_path / "template.jinja"
    file.write_text(TEMPLATE)
    for template in (TEMPLATE, str(file)):
        with LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64, chat_template=template) as other:
            [output] = other.chat(CHATS[0], GREEDY, use_tqdm=False)
            assert output.prompt_token_ids == expected.prompt_token_ids
            assert output.outputs[0].text == expected.outputs[0].text
            [own] = other.chat(CHATS[0], GREEDY, use_tqdm=False, chat_template="{{ messages[0].content }}")
            assert own.prompt == "Hi"


def test_a_template_that_is_no_file_is_refused_with_the_model(tiny_llama: TinyModel) -> None:
    with pytest.raises(ValueError, match=r"chat_template must be .* got 'nowhere\.jinja'"):
        LLM(tiny_llama.path, device="cpu", num_gpu_blocks_override=64, chat_template="nowhere.jinja")


def test_one_malformed_chat_stops_the_call_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(ValueError, match="message 0 must be an object with a role"):
        llm.chat([CHATS[0], [{"content": "Hi"}]], GREEDY, use_tqdm=False, chat_template=TEMPLATE)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize("messages", ["Hi", {"role": "user", "content": "Hi"}, 3])
def test_what_is_no_list_of_messages_is_named_whole(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="messages must be a list") as error:
        llm.chat(messages)
    assert repr(messages) in str(error.value)
