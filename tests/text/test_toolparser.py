"""Tool calls out of a model's output, cut at every place."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.text.toolparser import CallArguments, CallBegin, CallEnd, Piece, Text, ToolCallParser

F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {"s": "}</tool_call>\\"{é"}}'


@dataclass
class Seen:
    text: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    complete: list[bool] = field(default_factory=list)

    def add(self, pieces: list[Piece]) -> Seen:
        for piece in pieces:
            if isinstance(piece, Text):
                self.text += piece.text
            elif isinstance(piece, CallBegin):
                assert piece.index == len(self.calls)
                self.calls.append((piece.id, piece.name, ""))
            elif isinstance(piece, CallEnd):
                assert piece.index == len(self.calls) - 1
                self.complete += [piece.complete]
            else:
                assert isinstance(piece, CallArguments) and piece.index == len(self.calls) - 1 and piece.text
                identity, name, arguments = self.calls[-1]
                self.calls[-1] = (identity, name, arguments + piece.text)
        return self

    @property
    def plain(self) -> tuple[str, list[tuple[str, str]]]:
        return self.text, [(name, arguments) for _, name, arguments in self.calls]


def parse(pieces: list[str] | str, *, eager: bool = False, max_calls: int | None = None) -> Seen:
    ids = count()
    parser = ToolCallParser(lambda: f"call_{next(ids)}", eager=eager, max_calls=max_calls)
    seen = Seen()
    for piece in pieces if isinstance(pieces, list) else [pieces]:
        seen.add(parser.push(piece))
    seen.add(parser.flush())
    assert [c[0] for c in seen.calls] == [f"call_{i}" for i in range(len(seen.calls))]
    assert len(seen.complete) == len(seen.calls) and sum(seen.complete) == parser.complete
    assert eager or all(seen.complete)
    return seen


FA, GA = '{"a": 1}', '{"s": "}</tool_call>\\"{é"}'
GOOD: list[tuple[str, str, list[tuple[str, str]]]] = [
    (f"<tool_call>\n{F}\n</tool_call>", "", [("f", FA)]),
    (f"<tool_call>{G}</tool_call>", "", [("g", GA)]),
    (f"Let me look. \n<tool_call>\n{F}\n</tool_call>\n", "Let me look.", [("f", FA)]),
    (f"<tool_call>{F}</tool_call>\n<tool_call>{G}</tool_call>", "", [("f", FA), ("g", GA)]),
    (f"<tool_call>[{F}, {G}]</tool_call>", "", [("f", FA), ("g", GA)]),
    (f"<tool_call>[\n{F},\n{G}\n]</tool_call> and more", "and more", [("f", FA), ("g", GA)]),
    (f"<tool_call>{F}\n{G}</tool_call>", "", [("f", FA), ("g", GA)]),
    (f"<tool_call>{F}\n<tool_call>{G}\n", "", [("f", FA), ("g", GA)]),
    (f"a\n<tool_call>{F}</tool_call>\n b c\n<tool_call>{G}", "ab c", [("f", FA), ("g", GA)]),
    (f"<tool_call>[{F}", "", [("f", FA)]),
    (f"<tool_call>{F[:-1]}</tool_call>", "", [("f", FA)]),  # the last brace is missing
    (f"<tool_call>{F[:-1]}", "", [("f", FA)]),
    ('<tool_call>{"name":"f","parameters":{}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"arguments": {"x": [1, {"y": null}]}, "name": "f"}</tool_call>',
     "", [("f", '{"x": [1, {"y": null}]}')]),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 2}"}</tool_call>', "", [("f", '{"a": 2}')]),
    ('<tool_call>{"id": {"n": {}}, "name": "f", "arguments": {"é": 1}}</tool_call>', "", [("f", '{"é": 1}')]),
    ('<tool_call>{"name": "\\u0066", "arguments": {}, "name": "x"}</tool_call>', "", [("f", "{}")]),
    (f"<tool_call><tool_call>{F}</tool_call>", "<tool_call>", [("f", FA)]),
    (f"<<tool_<tool_call>{F}</tool_call>", "<<tool_", [("f", FA)]),
    ('<tool_call>{"arguments": {"x": "\\ud800"}, "name": "f"}</tool_call>', "", [("f", '{"x": "\\ud800"}')]),
]  # fmt: skip
PLAIN = [
    "", " ", "Hello  world\n", "a < b <tool> </tool_call> <tool_call", "<tool_call>", "<tool_call></tool_call>",
    "<tool_call>[]</tool_call>\n", "The tag <tool_call> begins a call.", "<tool_call>{not json}</tool_call> x",
    '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "f", "arguments": "x"}</tool_call>', '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f"', "<tool_call>[[{}]]</tool_call>",
    '<tool_call>"f"</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1}, "name"',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {"x": 1e999}, "name": "f"}</tool_call>', "<tool_call>{'name': 'f'}</tool_call>", F,
]  # fmt: skip
BROKEN = [  # broken when the arguments have begun
    '<tool_call>{"name": "f", "arguments": {"a": oops}}</tool_call>',
    '<tool_call>{"name": "f", "arguments": {"a": 1',
    '<tool_call>{"name": "f", "arguments": {"a": 1}} , x</tool_call>',
]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("output", "text", "calls"), GOOD)
def test_calls_are_found_however_the_output_is_cut(
    output: str, text: str, calls: list[tuple[str, str]], eager: bool
) -> None:
    assert parse(output, eager=eager).plain == (text, calls)
    assert parse(list(output), eager=eager).plain == (text, calls)
    for i in range(len(output)):
        assert parse([output[:i], output[i:]], eager=eager).plain == (text, calls)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("output", PLAIN)
def test_what_is_no_call_is_text_to_the_last_character(output: str, eager: bool) -> None:
    if eager and output.startswith('<tool_call>{"name": "f", "arguments": {'):
        return  # its arguments were handed on already: the next test
    for pieces in ([output], list(output), *([output[:i], output[i:]] for i in range(len(output)))):
        assert parse(pieces, eager=eager).plain == (output, [])


@pytest.mark.parametrize("output", BROKEN[:2])
def test_a_broken_call_is_text_as_a_whole_or_what_was_handed_on_and_a_rest(output: str) -> None:
    assert parse(output).plain == (output, [])
    for pieces in (list(output), *([output[:i], output[i:]] for i in range(len(output)))):
        seen = parse(pieces, eager=True)
        handed_on = "".join(arguments for _, _, arguments in seen.calls)
        rest = output[output.index('{"a"') :] if seen.calls else output
        assert handed_on + seen.text == rest  # nothing is lost, nothing comes twice
        assert seen.complete == [False]


def test_text_after_a_complete_object_is_text() -> None:
    assert parse(BROKEN[2]).plain == (", x</tool_call>", [("f", FA)])


pieces_of_output = st.lists(
    st.sampled_from([F, G, "<tool_call>", "</tool_call>", "<tool_", "[", "]", ",", "\n", " ", "text", "{", "}", '"',
                     "<", '{"name": "f", "arguments": {', "é"]), max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(pieces_of_output, st.data(), st.booleans())
def test_any_output_cut_anywhere(output: str, data: st.DataObject, eager: bool) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=8)))
    pieces = [output[a:b] for a, b in zip([0, *cuts], [*cuts, len(output)])]
    whole, cut = parse(output, eager=eager), parse(pieces, eager=eager)
    assert cut.plain == whole.plain
    for _, name, arguments in parse(output).calls:
        assert name in "fg" and isinstance(json.loads(arguments), dict)
    if "<tool_call>" not in output:
        assert cut.plain == (output, [])
    # Nothing is lost but tags, the frame of calls, and the space around them.
    kept = cut.text + "".join(a for _, _, a in cut.calls)
    assert not (set("".join(kept.split())) - set(output))
    assert cut.text.count("text") == output.count("text") and kept.count("é") == output.count("é")


def test_text_is_held_back_no_longer_than_necessary() -> None:
    parser = ToolCallParser(lambda: "id", eager=True)

    def shown(text: str) -> str:
        return Seen().add(parser.push(text)).text

    assert shown("a b") == "a b"
    assert shown(" ") == "" and shown("c") == " c"
    assert shown("<tool_cal") == "" and shown("m") == "<tool_calm"
    assert shown("<tool_call> {") == "" and shown("x") == "<tool_call> {x"


def test_arguments_come_while_they_are_written() -> None:
    parser = ToolCallParser(lambda: "id", eager=True)
    assert parser.push('<tool_call>{"name": "write", "arguments": ') == []
    assert parser.push('{"text": "on') == [CallBegin(0, "id", "write"), CallArguments(0, '{"text": "on')]
    assert parser.push('ce"') == [CallArguments(0, 'ce"')]
    assert parser.push("}") == [CallArguments(0, "}")]
    assert parser.push("}</tool_call>\n") == [CallEnd(0, complete=True)] and parser.flush() == [] and parser.calls == 1


@pytest.mark.parametrize("eager", [False, True])
def test_calls_of_unknown_functions_are_text(eager: bool) -> None:
    def parser() -> ToolCallParser:
        return ToolCallParser(lambda: "id", eager=eager, names={"f"})

    for output in (f"<tool_call>{G}</tool_call>", '<tool_call>{"arguments": {}, "name": "ff"}</tool_call>'):
        p = parser()
        seen = Seen()
        for char in output:
            seen.add(p.push(char))
        assert seen.add(p.flush()).plain == (output, [])
    p = parser()
    assert Seen().add(p.push(f"<tool_call>[{F}, {G}]</tool_call>") + p.flush()).plain == (
        f", {G}]</tool_call>",
        [("f", FA)],
    )


def test_calls_over_the_limit_are_dropped() -> None:
    output = f"a <tool_call>[{F}, {G}]</tool_call><tool_call>{F}</tool_call> b"
    for eager in (False, True):
        assert parse(list(output), eager=eager, max_calls=1).plain == ("ab", [("f", FA)])


def test_the_time_grows_with_the_length_only() -> None:
    big = json.dumps({"name": "f", "arguments": {"text": "x y\n" * 20_000}})
    assert len(parse([f"<tool_call>{big}</tool_call>"]).calls) == 1
    many = '{"x": ' + "{}" + ', "x": {}' * 20_000 + ', "name": "f"}'
    assert len(parse([f"<tool_call>{many}</tool_call>"]).calls) == 1
    assert parse(["a b <"] * 20_000).text == "a b <" * 20_000
