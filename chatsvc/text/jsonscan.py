"""JSON as it comes, character by character: is this still the beginning of a value, and where does the value end?

Nothing is built here; a complete value goes to ``json.loads``. What it is for: the arguments of a tool call are handed
on while the model writes them, and text that is no JSON after all must not be held back to the end of the answer.
"""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = frozenset(" \t\n\r")
_ESCAPES = frozenset('"\\/bfnrtu')
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_HEX = frozenset("0123456789abcdefABCDEF")
# What a number or a word may look like before it is complete, and when it is.
_WORDS = ("true", "false", "null")
_NUMBER_SO_FAR = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
MAX_DEPTH = 64
MAX_NUMBER = 400  # characters; the longest number anybody means


class _Next(Enum):
    VALUE = auto()
    VALUE_OR_END = auto()  # after "["
    KEY = auto()  # after "," in an object
    KEY_OR_END = auto()  # after "{"
    COLON = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()  # the value is complete


class JsonScanner:
    """One object or array (RFC 8259), nested at most ``MAX_DEPTH`` deep.

    Attributes:
        depth: open objects and arrays.
        done: the value is complete; :meth:`feed` takes nothing any more.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._next = _Next.VALUE
        self._in_string = False
        self._is_key = False
        self._escape = 0  # 0: none; 1: a backslash was seen; 2..5: hex digits are due
        self._scalar = ""

    @property
    def depth(self) -> int:
        return len(self._open)

    @property
    def done(self) -> bool:
        return self._next is _Next.NOTHING

    def plain(self, text: str, at: int) -> int:
        """The end of the run from ``at`` that lies inside a string and holds nothing to look at: skip it unread."""
        if not self._in_string or self._escape:
            return at
        return _PLAIN.match(text, at).end()  # type: ignore[union-attr]

    def feed(self, char: str) -> bool:
        """Take one character; False when it cannot stand here (the scanner is of no use then)."""
        if self._in_string:
            return self._string(char)
        if self._scalar:
            if char not in ",]} \t\n\r":
                self._scalar += char
                return self._scalar_so_far()
            if not (self._scalar in _WORDS or _NUMBER.fullmatch(self._scalar)):
                return False
            self._scalar = ""
            self._next = _Next.COMMA_OR_END
        if char in _SPACE:
            return not self.done
        return self._structure(char)

    def _structure(self, char: str) -> bool:
        state = self._next
        if state in (_Next.VALUE, _Next.VALUE_OR_END):
            if char == "]" and state is _Next.VALUE_OR_END:
                return self._close(char)
            return self._begin(char)
        if state in (_Next.KEY, _Next.KEY_OR_END):
            if char == "}" and state is _Next.KEY_OR_END:
                return self._close(char)
            self._in_string = self._is_key = char == '"'
            return self._in_string
        if state is _Next.COLON:
            self._next = _Next.VALUE
            return char == ":"
        if state is _Next.COMMA_OR_END:
            if char == ",":
                self._next = _Next.KEY if self._open[-1] == "{" else _Next.VALUE
                return True
            return self._close(char)
        return False

    def _begin(self, char: str) -> bool:
        if char in "{[":
            self._open.append(char)
            self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
            return len(self._open) <= MAX_DEPTH
        if not self._open:
            return False
        if char == '"':
            self._in_string, self._is_key = True, False
            return True
        self._scalar = char
        return self._scalar_so_far()

    def _close(self, char: str) -> bool:
        if char not in "]}" or self._open.pop() != ("{" if char == "}" else "["):
            return False
        self._next = _Next.COMMA_OR_END if self._open else _Next.NOTHING
        return True

    def _string(self, char: str) -> bool:
        if self._escape == 1:
            self._escape = 2 if char == "u" else 0
            return char in _ESCAPES
        if self._escape:
            self._escape = (self._escape + 1) % 6
            return char in _HEX
        if char == "\\":
            self._escape = 1
        elif char == '"':
            self._in_string = False
            self._next = _Next.COLON if self._is_key else _Next.COMMA_OR_END
        return char >= " "

    def _scalar_so_far(self) -> bool:
        text = self._scalar
        if text[0].isalpha():
            return any(word.startswith(text) for word in _WORDS)
        return len(text) <= MAX_NUMBER and _NUMBER_SO_FAR.fullmatch(text) is not None
