"""Tool calls in a model's output, in the form of Hermes, Qwen and SmolLM.

::

    Let me look. <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

One tag may hold several objects, as a list or one after the other; there may be several tags; the last may be unclosed
at the end of the answer. Space between calls, and between them and the text around, is no text. What looks like a call
and is none (no JSON, no known name) is text like any other, tags included: nothing the model wrote is lost.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from chatsvc.text.jsonscan import JsonScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"

# The usual order of the keys: what follows is handed on while it is written.
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{\Z)', re.DOTALL)
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True, slots=True)
class Text:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; ``index`` counts the calls of the answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of call ``index``: joined, they are a JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """Call ``index`` has ended. ``complete``: its arguments are a JSON object; else they broke off, or the rules."""

    index: int
    complete: bool


Piece = Text | CallBegin | CallArguments | CallEnd


class _State(Enum):
    TEXT = auto()
    BODY = auto()  # inside a tag, where an object may begin
    OBJECT = auto()


class ToolCallParser:
    """Takes the output in any pieces; text is held back only while it may still become (part of) a call.

    Args:
        new_id: makes the id of a call.
        eager: hand on a call's arguments while they come. A call that turns out to be broken then stays what was
            handed on, and its rest is text, wherever the output was cut. Otherwise a call comes when it is complete,
            and a broken one is text as a whole.
        names: of the functions there are; None: any name will do.
        max_calls: calls after so many are dropped; None: no limit.
    """

    def __init__(
        self,
        new_id: Callable[[], str],
        *,
        eager: bool,
        names: Collection[str] | None = None,
        max_calls: int | None = None,
    ) -> None:
        self._new_id = new_id
        self._names = names
        self._eager = eager
        self._max_calls = max_calls
        self._state = _State.TEXT
        self._out: list[Piece] = []
        self._held: list[str] = []  # characters that may yet be text: a space, part of a tag, a tag and what is in it
        self._tag_at = 0  # how many characters of OPEN (in TEXT) or CLOSE (in BODY) the end of ``_held`` has
        self._object: list[str] = []
        self._scanner = JsonScanner()
        self._looked = False  # for the usual order of the keys
        self._arguments_at: int | None = None  # where in ``_object`` the arguments begin
        self._arguments_end: int | None = None
        self._sent = 0  # characters of the arguments that were handed on
        self._name: str | None = None
        self._after_call = False
        self.calls = 0
        """Calls so far, the one that is being written not counted."""
        self.complete = 0
        """Those of them that can be made."""

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        at = 0
        while at < len(text):
            if self._state is _State.TEXT and not self._held:
                at = self._plain(text, at)
                continue
            if self._state is _State.OBJECT and (end := self._scanner.plain(text, at)) > at:
                self._object += text[at:end]
                at = end
                continue
            self._step(text[at])
            at += 1
        self._send_arguments()
        return self._take()

    def flush(self) -> list[Piece]:
        """The end of the output: what was held back is a call after all, or text."""
        if self._state is _State.OBJECT:
            self._give_up()
        if self._state is not _State.TEXT and not self._body_is_new():
            self._held.clear()  # an unclosed tag whose objects all became calls
        self._state = _State.TEXT
        self._release()
        return self._take()

    # -- states ------------------------------------------------------------------------------------------------

    def _plain(self, text: str, at: int) -> int:
        """Text up to what may have to be held back: a tag, and the space at its end."""
        end = text.find("<", at)
        segment = text[at:] if end < 0 else text[at:end]
        certain = segment.rstrip()
        self._text(certain)
        self._held += segment[len(certain) :]
        if end < 0:
            return len(text)
        self._held.append("<")
        self._tag_at = 1
        return end + 1

    def _step(self, char: str) -> None:
        if self._state is _State.TEXT:
            self._in_text(char)
        elif self._state is _State.BODY:
            self._in_body(char)
        else:
            self._in_object(char)

    def _in_text(self, char: str) -> None:
        """Held are spaces and then, perhaps, the beginning of a tag."""
        if char == OPEN[self._tag_at]:
            self._held.append(char)
            self._tag_at += 1
            if self._tag_at == len(OPEN):
                self._state, self._tag_at = _State.BODY, 0
            return
        if self._tag_at == 0 and char.isspace():
            self._held.append(char)
            return
        self._release()
        if char == "<" or char.isspace():
            self._held.append(char)
            self._tag_at = 1 if char == "<" else 0
        else:
            self._text(char)

    def _in_body(self, char: str) -> None:
        if self._tag_at or char == "<":
            self._in_close(char)
        elif char == "{":
            self._state = _State.OBJECT
            self._object, self._scanner = [], JsonScanner()
            self._arguments_at = self._arguments_end = self._name = None
            self._looked, self._sent = False, 0
            self._in_object(char)
        elif char.isspace() or char in ",[]":
            self._held.append(char)
        else:
            self._no_call(char)

    def _in_close(self, char: str) -> None:
        """``<`` in a body: the end of it, or (where a model forgets the end) the next beginning."""
        seen = "".join(self._held[len(self._held) - self._tag_at :]) + char
        if not (CLOSE.startswith(seen) or OPEN.startswith(seen)):
            self._no_call(char)
            return
        self._held.append(char)
        self._tag_at = len(seen)
        if seen == CLOSE:
            if self._body_is_new():  # nothing in it: text
                self._no_call("")
            else:
                self._held.clear()
                self._state, self._tag_at = _State.TEXT, 0
        elif seen == OPEN:
            if self._body_is_new():
                del self._held[-len(OPEN) :]
                self._release()
            self._held, self._tag_at = list(OPEN), 0

    def _in_object(self, char: str) -> None:
        if not self._scanner.feed(char):
            self._give_up()
            self._step(char)
            return
        self._object.append(char)
        if char == "{" and self._scanner.depth == 2 and not self._looked:
            self._looked = True
            head = _HEAD.match("".join(self._object))
            if head is not None and self._known(name := _loads(head[1])):
                self._arguments_at, self._name = len(self._object) - 1, name
        elif (
            char == "}" and self._scanner.depth == 1 and self._arguments_at is not None and self._arguments_end is None
        ):
            self._arguments_end = len(self._object)
        if self._scanner.done:
            self._complete()

    # -- the end of an object ----------------------------------------------------------------------------------

    def _complete(self) -> None:
        """A whole object: a call, if it has a name."""
        if self._arguments_at is None:
            call = _call(_loads("".join(self._object)))
            if call is None or not self._known(call[0]):
                self._give_up()
                return
            self._name, arguments = call
            self._object = list(arguments)
            self._arguments_at, self._arguments_end = 0, len(arguments)
        self._send_arguments(complete=True)
        self._next_object()

    def _give_up(self) -> None:
        """The object is broken, or cut off by the end of the output. Only its last brace may be missing."""
        if self._arguments_end is not None and not "".join(self._object[self._arguments_end :]).strip(" \t\r\n,"):
            self._send_arguments(complete=True)
            self._next_object()
            return
        self._send_arguments()
        if self._sent and self._arguments_at is not None:  # what was handed on cannot be taken back
            self._out.append(CallEnd(self.calls, complete=False))
            self.calls += 1
            self._held = self._object[self._arguments_at + self._sent :]
        else:
            self._held += self._object
        self._object = []
        self._no_call("")

    def _next_object(self) -> None:
        """The object is a call."""
        if not self._dropped():
            self._out.append(CallEnd(self.calls, complete=True))
            self.complete += 1
        self.calls += 1
        self._after_call = True
        self._held, self._object = [], []
        self._state = _State.BODY

    def _no_call(self, char: str) -> None:
        """What is held is text after all; and so is what follows, up to the next tag."""
        self._state, self._tag_at = _State.TEXT, 0
        self._release()
        for c in char:
            if c == "<" or c.isspace():
                self._held.append(c)
                self._tag_at = 1 if c == "<" else 0
            else:
                self._text(c)

    def _body_is_new(self) -> bool:
        """No object of the open tag became a call."""
        return "".join(self._held).lstrip().startswith(OPEN)

    def _known(self, name: str | None) -> bool:
        return bool(name) and _is_unicode(name or "") and (self._names is None or name in self._names)

    # -- out ---------------------------------------------------------------------------------------------------

    def _dropped(self) -> bool:
        return self._max_calls is not None and self.calls >= self._max_calls

    def _send_arguments(self, *, complete: bool = False) -> None:
        """Hand on what is there of the arguments, if it is time."""
        if self._state is not _State.OBJECT or self._arguments_at is None or self._name is None or self._dropped():
            return
        if not (complete or self._eager):
            return
        if not self._sent:
            self._out.append(CallBegin(self.calls, self._new_id(), self._name))
        end = len(self._object) if self._arguments_end is None else self._arguments_end
        fragment = "".join(self._object[self._arguments_at + self._sent : end])
        self._sent += len(fragment)
        if fragment:
            self._out.append(CallArguments(self.calls, fragment))

    def _release(self) -> None:
        held = "".join(self._held)
        self._held.clear()
        self._tag_at = 0
        self._text(held)

    def _text(self, text: str) -> None:
        if self._after_call:
            text = text.lstrip()
        if text:
            self._after_call = False
            self._out.append(Text(text))

    def _take(self) -> list[Piece]:
        """What is out, with neighbouring texts joined."""
        out: list[Piece] = []
        texts: list[str] = []
        for piece in [*self._out, None]:
            if isinstance(piece, Text):
                texts.append(piece.text)
                continue
            if texts:
                out.append(Text("".join(texts)))
                texts = []
            if piece is not None:
                out.append(piece)
        self._out = []
        return out


def _loads(text: str) -> Any:
    """A complete JSON value; None when it is none, or has numbers that Python will not read."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _call(value: Any) -> tuple[str, str] | None:
    """(name, arguments as JSON text) of an object whose keys stand in an unusual order; None when it is no call."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
    if isinstance(arguments, str):  # some models write them as a string that holds JSON
        arguments = _loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        return name, text if _is_unicode(text) else json.dumps(arguments)
    except (ValueError, RecursionError):  # 1e999
        return None


def _is_unicode(text: str) -> bool:
    """False with half a surrogate pair in it, which JSON can name and UTF-8 cannot."""
    return not any("\ud800" <= char <= "\udfff" for char in text)
