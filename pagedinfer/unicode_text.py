"""What counts as text: characters, and no halves of them."""

from __future__ import annotations


def check_unicode(name: str, text: str) -> None:
    """Raises ValueError if a text has half a surrogate pair, which is no character: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be Unicode text, got {text[error.start]!a}, half a surrogate pair, at position "
            f"{error.start}"
        ) from None
