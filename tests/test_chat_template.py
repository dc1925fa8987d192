from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pagedinfer.chat_template import ChatTemplate, is_conversation
from tests.tiny_models import BOS, byte_level_tokenizer

TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 中"}]


def tokenizer_with(template: str | None, *, adds_bos: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    return tokenizer


# vllm#16853, #55197
@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", ["{{ bos_token }}" + TURNS, TURNS])
def test_bos_is_there_as_often_as_the_template_puts_it(template: str, adds_bos: bool) -> None:
    tokenizer = tokenizer_with(template, adds_bos=adds_bos)
    text, token_ids = ChatTemplate(tokenizer).encode(CHAT)
    assert token_ids == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert token_ids.count(BOS) == template.count("bos_token")
    assert text.endswith("<system>Be brief.\n<user>Hi 中\n<assistant>")


def test_generation_prompt_and_open_last_message() -> None:
    template = ChatTemplate(tokenizer_with(TURNS))
    assert template.render(CHAT, add_generation_prompt=False).endswith("Hi 中\n")
    begun = [*CHAT, {"role": "assistant", "content": "Well,"}]
    text = template.render(begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<assistant>Well,")


def test_tools_and_variables_reach_the_template() -> None:
    template = ChatTemplate(tokenizer_with("{{ tools[0].function.name }} {{ style }}"))
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]
    assert template.render(CHAT, tools=tools, template_kwargs={"style": "dry"}) == "look_up dry"


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate(tokenizer_with(TURNS))
    assert "<user>one\ntwo\n" in template.render([{"role": "user", "content": parts}])


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}], ids=str)
def test_a_message_without_content(content: dict[str, Any]) -> None:
    """As an assistant's that only calls tools: neither an error nor the word None."""
    chat = [{"role": "assistant", "tool_calls": [], **content}]
    for each in ("<{{ m.role }}>{{ m.content }}", "{{ '<' + m['role'] + '>' + m['content'] }}"):
        template = ChatTemplate(tokenizer_with("{% for m in messages %}" + each + "{% endfor %}"))
        assert template.render(chat) == "<assistant>"
    asks = ChatTemplate(tokenizer_with("{% for m in messages %}{{ m.content is defined }}{% endfor %}"))
    assert asks.render(chat) == str(content == {"content": ""})


# vllm#39279, #18140
def test_no_template_says_how_to_give_one(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(None)
    with pytest.raises(ValueError, match="no chat template: give one as chat_template"):
        ChatTemplate(tokenizer)
    expected = "<system>Be brief.\n<user>Hi 中\n<assistant>"
    assert ChatTemplate(tokenizer, TURNS).render(CHAT) == expected
    file = tmp_path / "template.jinja"
    file.write_text(TURNS, encoding="utf-8")
    assert ChatTemplate(tokenizer, str(file)).render(CHAT) == expected
    with pytest.raises(ValueError, match=r"path of a file with one, got 'nowhere\.jinja'"):
        ChatTemplate(tokenizer, "nowhere.jinja")


# GHSA-6fvq-23cw-5628, CVE-2025-62426
@pytest.mark.parametrize(
    "name", ["tokenize", "chat_template", "messages", "conversation", "add_generation_prompt", "return_dict"]
)
def test_variables_cannot_change_what_is_done(name: str) -> None:
    with pytest.raises(ValueError, match=f"template_kwargs cannot set {name}"):
        ChatTemplate(tokenizer_with(TURNS)).render(CHAT, template_kwargs={name: True})


# litellm#2949
@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match="the chat template failed"):
        ChatTemplate(tokenizer_with(template)).render(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users speak') }}", "only users speak"),
        ("{% for %}", "failed on these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(10 ** 9) | length }}", "failed on these messages"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
    ],
)
def test_what_a_template_raises_is_a_value_error(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(tokenizer_with(template)).render(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message, got 'Hi'"),
        (["Hi"], "message 0 must be an object with a role"),
        ([{"content": "Hi"}], "message 0 must be an object with a role"),
        ([CHAT[0], {"role": "user", "content": 5}], "content of message 1 must be a string or a list, got 5"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'text' only, got 'image_url'"),
    ],
)
def test_malformed_messages(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(tokenizer_with(TURNS)).render(messages)


def test_one_chat_or_several() -> None:
    assert is_conversation(CHAT)
    assert not is_conversation([CHAT, CHAT])
