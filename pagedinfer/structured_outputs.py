"""What form a generated text must have: JSON, a regular expression, a choice, or a grammar. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

MAX_GRAMMAR_CHARACTERS = 2**20
MAX_CHOICE_TEXTS = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of a text; exactly one of its kinds. Names are vLLM's.

    Tokens that the form does not allow are never drawn. The text is complete when generation ends with
    EOS; cut off by max_tokens, it is the beginning of one that has the form.

    Raises:
        ValueError: none or several kinds, or one of the wrong type or too large.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or parsed; the text is a JSON value that it describes."""
    regex: str | None = None
    """A regular expression that the whole text matches; Rust's syntax, without look-around."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar in llguidance's variant of Lark; the text is derived from `start`."""
    json_object: bool | None = None
    """True: the text is any JSON object."""
    disable_any_whitespace: bool = False
    """JSON without space that carries no meaning; otherwise up to 20 characters of it at a time."""

    def __post_init__(self) -> None:
        kinds = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if self.json_object not in (None, False, True) or not isinstance(self.disable_any_whitespace, bool):
            raise ValueError("structured_outputs: json_object and disable_any_whitespace are true or false")
        kinds += ["json_object"] * bool(self.json_object)
        if len(kinds) != 1:
            given = ", ".join(kinds) or "none"
            raise ValueError(
                f"structured_outputs must have one of json, regex, choice, grammar and json_object, got "
                f"{given}"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, str) or not value:
                raise ValueError(f"structured_outputs: {name} must be a text, got {value!r:.80}")
            _check_size(name, len(value))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """The same from a mapping with these names.

        Raises:
            ValueError: an unknown name, and as the class.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"structured_outputs has no {name!r}; there are {', '.join(known)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """What `from_mapping` takes, without defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False)}


def _schema(value: object) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"structured_outputs: json must be a JSON schema: {error}") from None
    if not isinstance(value, Mapping):
        raise ValueError(f"structured_outputs: json must be a JSON schema, an object, got {value!r:.80}")
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json must be a JSON schema: {error}") from None


def _choices(value: object) -> tuple[str, ...]:
    right = isinstance(value, Sequence) and not isinstance(value, str)
    if not isinstance(value, Sequence) or not right or not value:
        raise ValueError(f"structured_outputs: choice must be a list of texts, got {value!r:.80}")
    for text in value:
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"structured_outputs: choice must hold texts, none of them empty, got {text!r:.80}"
            )
    if len(value) > MAX_CHOICE_TEXTS:
        raise ValueError(f"structured_outputs: choice may hold {MAX_CHOICE_TEXTS} texts, got {len(value)}")
    _check_size("choice", sum(map(len, value)))
    return tuple(value)


def _check_size(name: str, length: int) -> None:
    if length > MAX_GRAMMAR_CHARACTERS:
        raise ValueError(
            f"structured_outputs: {name} may have {MAX_GRAMMAR_CHARACTERS} characters, got {length}"
        )
