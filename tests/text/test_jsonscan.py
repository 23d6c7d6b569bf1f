"""The scanner against the standard library's parser."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.text.jsonscan import MAX_DEPTH, JsonScanner

leaf = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(
    leaf, lambda c: st.lists(c, max_size=4) | st.dictionaries(st.text(), c, max_size=4), max_leaves=12
)
tops = st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4)


def scan(text: str) -> tuple[int, bool]:
    """(characters taken, whether the value was complete then)."""
    scanner = JsonScanner()
    i = 0
    while i < len(text):
        if (end := scanner.plain(text, i)) > i:
            i = end
            continue
        if scanner.done or not scanner.feed(text[i]):
            return i, scanner.done
        i += 1
    return len(text), scanner.done


def valid(text: str) -> bool:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@settings(deadline=None)
@given(tops, st.sampled_from([None, 2]), st.booleans())
def test_every_character_of_a_value_is_taken_and_its_end_is_seen(value: Any, indent: int | None, plain: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=plain)
    assert scan(text) == (len(text), True)
    assert scan(text[:-1]) == (len(text) - 1, False)
    assert scan(text + "x") == (len(text), True)


@settings(max_examples=300, deadline=None)
@given(tops, st.data())
def test_a_broken_value_is_never_complete(value: Any, data: st.DataObject) -> None:
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    new = data.draw(st.sampled_from(list('{}[]",:0-+.eE1\\utrn <\n\x01')) | st.just(""))
    broken = text[:at] + new + text[at + data.draw(st.integers(0, 1)) :]
    taken, done = scan(broken)
    if done:
        assert valid(broken[:taken])
    else:
        assert not (broken[:1] in ("[", "{") and valid(broken))


@pytest.mark.parametrize(
    "text",
    ["[01", "[1.]", "[.5", "[1e]", "[-]", "[+1", "[tru]", "[nul,", "[NaN", "[Infinity", "[1,]", '{"a":1,}', "{a", "{1:",
     "[\"\\x", '["\\u12g', '["\n', "{]", "[}", '"text"', "1", "true", "[1 2", '{"a" 1', '{"a":}', "[,",
     "[" * (MAX_DEPTH + 1), "[" + "1" * 500],
)  # fmt: skip
def test_refused(text: str) -> None:
    taken, done = scan(text)
    assert taken < len(text) and not done


def test_bad_numbers_are_seen_at_the_first_wrong_character() -> None:
    assert scan("[1.5e+3, -0.0, 0e1]") == (19, True)
    assert scan("[1e.5]")[0] == 3 and scan("[00]")[0] == 2 and scan("[1..2]")[0] == 3 and scan("[-a]")[0] == 2
