"""Stop strings in pieces of text against a letter-by-letter oracle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedinfer.engine.stop_strings import StopStrings


def first_stop(text: str, strings: list[str]) -> tuple[int, str] | None:
    """The oracle: reads the text letter by letter until one of the strings is complete."""
    for end in range(1, len(text) + 1):
        complete = [string for string in strings if text[:end].endswith(string)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@settings(deadline=None, max_examples=500)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", max_size=5), max_size=12),
    st.booleans(),
)
def test_any_pieces_and_strings(strings: list[str], text_pieces: list[str], include: bool) -> None:
    stops = StopStrings(strings, include=include)
    text, shown = "", ""
    for piece in text_pieces:
        text += piece
        shown += stops.append(piece)
        assert text.startswith(shown)
        if stops.found is not None:
            break
        # Held is what could become a stop string with what may come, and nothing else.
        held = text[len(shown) :]
        assert not held or any(string.startswith(held) for string in strings)
    expected = first_stop(text, strings)
    if expected is None:
        assert stops.found is None
        assert shown + stops.finish() == text
    else:
        start, string = expected
        assert stops.found == string
        assert shown == text[: start + len(string) if include else start]
        assert stops.finish() == ""


def test_a_string_that_ends_where_none_counts_is_passed_on() -> None:
    stops = StopStrings(["two"])
    assert stops.append("one two", honour=False) == "one two"
    assert stops.append(" thr") == " thr"
    assert (stops.append("tw"), stops.append("o")) == ("", "")
    assert stops.found == "two"


def test_a_string_that_begins_where_none_counts_and_ends_after() -> None:
    stops = StopStrings(["two"])
    assert stops.append("tw", honour=False) == ""
    assert stops.append("o") == ""
    assert stops.found == "two"
