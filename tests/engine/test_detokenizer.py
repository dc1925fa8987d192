"""Pieces of text against full decodes, for byte-level and byte-fallback tokenizers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from pagedinfer.engine.detokenizer import Detokenizer
from tests.tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {"byte-level": byte_level_tokenizer(), "byte-fallback": byte_fallback_tokenizer()}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def full_decode(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool = True) -> str:
    return tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)


def pieces(tokenizer: PreTrainedTokenizerFast, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    return [*(detokenizer.append([token]) for token in ids), detokenizer.finish()]


def encode(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def byte_tokens(tokenizer: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    """One token for each byte."""
    if tokenizer is TOKENIZERS["byte-fallback"]:
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]  # GPT-2's letters for bytes
    others = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [tokenizer.convert_tokens_to_ids(letters[byte]) for byte in data]


# vllm#8627, exo PR#1691, smg PR#710
@pytest.mark.parametrize(
    "text",
    [
        "ď",
        "中",
        "🔥",
        "👨\u200d👩\u200d👧\u200d👦",
        "ภาษาไทย",
        "a中b🔥 c",
        "中文 the fox 中文",
        "é" * 40,
        "\N{REPLACEMENT CHARACTER}x",
        " a",
        "",
    ],
)
def test_characters_over_several_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = encode(tokenizer, text)
    found = pieces(tokenizer, ids)
    assert "".join(found) == full_decode(tokenizer, ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in found)
        assert found[-1] == ""  # nothing had to wait for the end


def test_each_character_comes_with_its_last_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokens(tokenizer, "中🔥".encode())
    assert pieces(tokenizer, ids) == ["", "", "中", "", "", "", "🔥", ""]


# vllm#48853
def test_prompt_that_ends_inside_a_character(tokenizer: PreTrainedTokenizerFast) -> None:
    """The prompt is not seen; the generated rest of its character is no character."""
    rest = byte_tokens(tokenizer, "中".encode()[2:])
    found = pieces(tokenizer, rest + encode(tokenizer, "and"))
    assert "".join(found) == full_decode(tokenizer, rest + encode(tokenizer, "and"))
    assert "Hi" not in "".join(found)


# mlx-vlm#1771
@pytest.mark.parametrize("tail", [b"\xf0\x9f", b"\xff", b"\xe4\xb8", b"\xff\xff\xff\xff\xff"])
def test_end_inside_a_character(tokenizer: PreTrainedTokenizerFast, tail: bytes) -> None:
    ids = encode(tokenizer, "the fox") + byte_tokens(tokenizer, tail)
    found = pieces(tokenizer, ids)
    assert "".join(found) == full_decode(tokenizer, ids)
    at_once = Detokenizer(tokenizer)
    assert at_once.append(ids) + at_once.finish() == "".join(found)


def test_complete_characters_before_a_wrong_byte_stay(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = byte_tokens(tokenizer, "中".encode() + b"\xff" + "🔥".encode()) + encode(tokenizer, "the")
    found = "".join(pieces(tokenizer, ids))
    assert found.startswith("中" + REPLACEMENT)
    assert found.endswith("the")


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 329), max_size=60))
def test_any_tokens_of_a_byte_level_tokenizer(ids: list[int]) -> None:
    """Ids that are none, special ones and wrong bytes included."""
    tokenizer = TOKENIZERS["byte-level"]
    for skip in (True, False):
        assert "".join(pieces(tokenizer, ids, skip)) == full_decode(tokenizer, ids, skip)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.one_of(st.integers(259, 345), st.sampled_from([0, 1, 2]), st.text(min_size=1)), max_size=30)
)
def test_any_valid_text_of_a_byte_fallback_tokenizer(parts: list[int | str]) -> None:
    """Characters in bytes between all other tokens."""
    tokenizer = TOKENIZERS["byte-fallback"]
    ids: list[int] = []
    for part in parts:
        ids += byte_tokens(tokenizer, part.encode()) if isinstance(part, str) else [part]
    assert "".join(pieces(tokenizer, ids)) == full_decode(tokenizer, ids)


@settings(deadline=None, max_examples=300)
@given(st.lists(st.integers(0, 345), max_size=60))
def test_any_tokens_of_a_byte_fallback_tokenizer(ids: list[int]) -> None:
    """Where a run of bytes is invalid, no more U+FFFD than a full decode shows, and all else the same."""
    tokenizer = TOKENIZERS["byte-fallback"]
    found, expected = "".join(pieces(tokenizer, ids)), full_decode(tokenizer, ids)
    assert found.count(REPLACEMENT) <= expected.count(REPLACEMENT)
    if REPLACEMENT not in expected:
        assert found == expected
    tokens = [tokenizer.convert_ids_to_tokens(token) for token in ids]
    if not any(token and token.startswith("<0x") for token in tokens):
        assert found == expected


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_pieces_do_not_depend_on_how_the_tokens_come(data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[data.draw(st.sampled_from(sorted(TOKENIZERS)))]
    ids = data.draw(st.lists(st.integers(0, 330), max_size=40))
    detokenizer, left, found = Detokenizer(tokenizer), ids, ""
    while left:
        count = data.draw(st.integers(1, len(left)))
        found += detokenizer.append(left[:count])
        left = left[count:]
    assert found + detokenizer.finish() == "".join(pieces(tokenizer, ids))


def test_special_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    eos = tokenizer.eos_token_id
    ids = [eos, *encode(tokenizer, "the fox"), eos, eos, *encode(tokenizer, "the fox"), eos]
    for skip in (True, False):
        found = "".join(pieces(tokenizer, ids, skip))
        assert found == full_decode(tokenizer, ids, skip)
        assert (tokenizer.eos_token in found) is not skip


class SpacingTokenizer(ByT5Tokenizer):  # type: ignore[misc]
    """A tokenizer without a backend that does as it is told about spaces; few of transformers' do."""

    def _decode(
        self, token_ids: list[int], spaces_between_special_tokens: bool = True, **options: object
    ) -> str:
        texts = [super(SpacingTokenizer, self)._decode([token], **options) for token in token_ids]
        special = [token in self.all_special_ids for token in token_ids]
        for i in range(1, len(texts)):
            if special[i] and special[i - 1] and spaces_between_special_tokens:
                texts[i] = " " + texts[i]
        return "".join(texts)


@pytest.mark.parametrize("spaces", [True, False])
def test_spaces_between_special_tokens(spaces: bool) -> None:
    tokenizer = SpacingTokenizer()
    eos = tokenizer.eos_token_id
    ids = [*encode(tokenizer, "ab"), eos, eos, *encode(tokenizer, "cd")]
    for skip, expected in ((False, "ab</s> </s>cd" if spaces else "ab</s></s>cd"), (True, "abcd")):
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, spaces_between_special_tokens=spaces)
        text = "".join(detokenizer.append([token]) for token in ids) + detokenizer.finish()
        assert text == expected


@pytest.mark.parametrize("kind", ["special", "wrong byte", "text"])
def test_work_per_token_does_not_grow(tokenizer: PreTrainedTokenizerFast, kind: str) -> None:
    token = {
        "special": [tokenizer.eos_token_id],
        "wrong byte": byte_tokens(tokenizer, b"\xff"),
        "text": encode(tokenizer, "the"),
    }[kind]
    detokenizer = Detokenizer(tokenizer)
    decoded: list[int] = []
    decode = detokenizer._decode
    detokenizer._decode = lambda ids, *, skip=None: decoded.append(len(ids)) or decode(ids, skip=skip)  # type: ignore
    found = "".join(detokenizer.append(token) for _ in range(400)) + detokenizer.finish()
    assert found == full_decode(tokenizer, token * 400)
    assert max(decoded) < 40
