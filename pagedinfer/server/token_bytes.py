"""The bytes that each token stands for. A character may be spread over several tokens: bytes never are."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenBytes:
    """Looks the bytes of tokens up, and remembers them.

    Args:
        tokenizer: byte-level, with byte fallback, or any other, whose tokens are then taken as texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
        self._kinds = set(_types(decoder))
        self._added = set(tokenizer.get_added_vocab().values())
        self._found: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes of a token, special ones' names included; empty for an id that is none."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._look_up(token_id)
        return found

    def text(self, token_id: int) -> str:
        """The bytes as text; U+FFFD for what is no whole character."""
        return self.of(token_id).decode("utf-8", "replace")

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(token, str):
            return b""
        if token_id in self._added:
            return token.encode()
        if "ByteLevel" in self._kinds and all(character in _BYTE_OF for character in token):
            return bytes(_BYTE_OF[character] for character in token)
        byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return token.replace("▁", " ").encode()


def _types(decoder: dict[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    return [decoder["type"], *(kind for part in decoder.get("decoders", ()) for kind in _types(part))]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies, as GPT-2 chose them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_alphabet()
