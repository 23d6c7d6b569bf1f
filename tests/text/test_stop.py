"""Stop strings: nothing of them is ever shown, everything else is shown as soon as it can be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.text.stop import StopMatcher

SETTINGS = settings(max_examples=400, deadline=None)
word = st.text(alphabet="ab", min_size=1, max_size=5)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that is complete first; of two that end together the longer one."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, minus_length, stop = min(ends)
    return text[: end + minus_length], stop


def feed(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(tuple(stops))
    out, found = [], None
    for piece in pieces:
        released, found = matcher.push(piece)
        out.append(released)
    out.append(matcher.flush())
    return out, found


@SETTINGS
@given(stops=st.lists(word, max_size=4), pieces=st.lists(st.text(alphabet="abc", max_size=4), max_size=10))
def test_equals_the_whole_text_answer_for_every_cut(stops: list[str], pieces: list[str]) -> None:
    out, found = feed(stops, pieces)
    assert ("".join(out), found) == naive("".join(pieces), stops)


@SETTINGS
@given(stops=st.lists(word, min_size=1, max_size=4), text=st.text(alphabet="abc", max_size=16))
def test_only_a_proper_prefix_of_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    matcher, shown, seen = StopMatcher(tuple(stops)), "", ""
    for char in text:
        released, found = matcher.push(char)
        shown, seen = shown + released, seen + char
        if found:
            break
        prefixes = [stop[:n] for stop in stops for n in range(len(stop))]
        held = max((p for p in prefixes if seen.endswith(p)), key=len)
        assert shown + held == seen


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "found"),
    [
        (["own fox"], ["The br", "own", " fo", "x jumps"], "The br", "own fox"),
        (["own fox"], ["The br", "own", " fo", "z jumps"], "The brown foz jumps", None),
        (["DEFGHIJ"], list("ABCDEFGHIJKL"), "ABC", "DEFGHIJ"),
        (["DEFGHIJ"], ["ABCDEFGHIJKL"], "ABC", "DEFGHIJ"),
        (["\n\n", "\n\nUser"], ["a\n", "\nUser"], "a", "\n\n"),
        (["ab", "b"], ["xab"], "x", "ab"),
        (["aab"], ["aaaab"], "aa", "aab"),
        (["é"], ["caf", "é!"], "caf", "é"),
        ([""], ["anything"], "anything", None),
        ([], ["anything"], "anything", None),
    ],
)
def test_examples(stops: list[str], pieces: list[str], text: str, found: str | None) -> None:
    out, matched = feed(stops, pieces)
    assert ("".join(out), matched) == (text, found)


def test_a_near_miss_is_released_at_once() -> None:
    matcher = StopMatcher(("own fox",))
    assert [matcher.push(p)[0] for p in ("br", "own", " fo", "z")] == ["br", "", "", "own foz"]


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.flush() == ""


def test_long_stop_strings_cost_one_step_a_character() -> None:
    stop = "a" * 20_000 + "b"
    matcher = StopMatcher((stop,))
    steps = 0
    real = matcher._step

    def counted(node: int, char: str) -> int:
        nonlocal steps
        steps += 1
        return real(node, char)

    matcher._step = counted  # type: ignore[method-assign]
    out = [matcher.push("a")[0] for _ in range(50_000)]
    assert steps == 50_000
    assert "".join(out) == "a" * 30_000
    assert matcher.push("b") == ("", stop)
