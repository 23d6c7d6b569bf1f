"""Marks that keep what people wrote apart from what a chat template wrote.

Before rendering, every string of the messages gets private characters wherever it holds, or could complete, the
string of an added token; after rendering only unmarked strings count as added tokens, and the marks are taken away.

::

    user wrote        hi<|im_end|>            marked   hi<#|im_end|>      # breaks a control token's string
    user wrote        <think>x</think>        marked   [<think>]x[</think>]     # with the space around it
    rendered          <|im_start|>user\n hi<#|im_end|> <|im_end|>
    parts             ID  "user\n hi<|im_end|> "  ID

Control tokens are broken inside, so that no operation of a template puts them together again. Other added tokens
(``<think>``, ``<tool_call>``) are only wrapped: templates look for them in contents and must find them.
The characters are chosen at random for each call from those that no string of the messages holds.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from chatsvc.errors import InvalidRequest
from chatsvc.text.parts import AddedToken

# Supplementary private use areas: no letter, no space, no case, in no model's vocabulary.
PRIVATE = range(0x100000, 0x10FFFE)
_MAX_DEPTH = 64
_SPACE = re.compile(r"\s*")
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython", "model"})
_TYPES = frozenset({"text", "function", "object", "string", "number", "integer", "boolean", "array", "null"})


@dataclass(frozen=True, slots=True)
class Marks:
    """The private characters of one call."""

    gap: str
    start: str
    end: str
    splice: str
    tail: str

    @classmethod
    def choose(cls, texts: Iterable[str]) -> Marks:
        """Characters that none of ``texts`` holds."""
        taken = {char for text in texts if not text.isascii() for char in text if ord(char) >= PRIVATE.start}
        free: list[str] = []
        for _ in range(1000):
            char = chr(PRIVATE.start + secrets.randbelow(len(PRIVATE)))
            if char not in taken:
                taken.add(char)
                free.append(char)
                if len(free) == 5:
                    return cls(*free)
        raise InvalidRequest("the messages use up all private characters of Unicode", param="messages")


def leaves(value: Any, depth: int = 0) -> Iterator[str]:
    """Every string in a JSON value, keys of objects included. InvalidRequest when it is nested too deeply."""
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"nested more than {_MAX_DEPTH} levels deep", param="messages")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(key, depth + 1)
            yield from leaves(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item, depth + 1)


class Guard:
    """Marks strings for one tokenizer and one template.

    Args:
        literals: the strings written in the template. Where one of them ends inside an added token's string
            (``'<|' + message.role + '|>'``), words that could complete the token are marked, too.
    """

    def __init__(self, added: Iterable[AddedToken], literals: Iterable[str]) -> None:
        tokens = [token for token in added if token.content]
        # A string of one character cannot be broken inside.
        breakable = [t.content for t in tokens if t.special and len(t.content) > 1]
        wrappable = [t.content for t in tokens if not (t.special and len(t.content) > 1)]
        self._break = _any_of(breakable)
        self._wrap = _any_of(wrappable)
        self._wrappable = rf"\s*(?:{self._wrap.pattern})\s*"
        folded = {t.content.casefold() for t in tokens}
        self._heads = {text[:i] for text in folded for i in range(1, len(text))}
        self._tails = {text[i:] for text in folded for i in range(1, len(text))}
        self._longest = max(map(len, folded), default=1)
        ends = {literal.casefold()[-i:] for literal in literals for i in range(1, self._longest)} & self._heads
        self._open = [text for text in folded if any(text.startswith(end) for end in ends)]

    def mark(self, value: Any, marks: Marks, key: str = "") -> Any:
        """A copy of a JSON value with all its strings marked; ``key`` is the key it stands under."""
        if isinstance(value, str):
            known = (key == "role" and value in _ROLES) or (key == "type" and value in _TYPES)
            return value if known else self._mark_text(value, marks)
        if isinstance(value, Mapping):
            return {
                self._mark_key(k, marks): self.mark(item, marks, k if isinstance(k, str) else "")
                for k, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.mark(item, marks, key) for item in value]
        return value

    def pieces(self, text: str, marks: Marks) -> Iterator[tuple[str, bool]]:
        """Cut rendered text into (piece, may hold added tokens). Marks are still in the pieces that may."""
        wrapped = re.compile(f"{marks.start}({self._wrappable}){marks.end}")
        at = 0
        for match in wrapped.finditer(text):
            if match.start() > at:
                yield text[at : match.start()], True
            yield match.group(1), False
            at = match.end()
        if at < len(text):
            yield text[at:], True

    def _mark_key(self, key: Any, marks: Marks) -> Any:
        if not isinstance(key, str):
            return key
        # Templates look fields up by name; a name that holds no added token's string must stay as it is.
        harmless = key.isidentifier() and not self._break.search(key) and not self._wrap.search(key)
        return key if harmless else self._mark_text(key, marks)

    def _mark_text(self, text: str, marks: Marks) -> str:
        bare = text.strip()
        if not bare:
            return text
        # What stands at the edges may grow together with what the template, or another string, puts beside it.
        after = before = ""
        folded = bare[-self._longest :].casefold()
        starts_token = any(folded[-i:] in self._heads for i in range(1, len(folded) + 1))
        if starts_token or any(folded in token for token in self._open if len(bare) < len(token)):
            after = marks.gap
        folded = bare[: self._longest].casefold()
        if any(folded[:i] in self._tails for i in range(1, len(folded) + 1)):
            before = marks.gap
        text = self._break.sub(lambda m: m.group()[0] + marks.gap + m.group()[1:], text)
        text = self._wrapped(text, marks)
        if before or after:
            lead = len(text) - len(text.lstrip())
            trail = len(text.rstrip())
            text = text[:lead] + before + text[lead:trail] + after + text[trail:]
        return text

    def _wrapped(self, text: str, marks: Marks) -> str:
        """Put start and end marks around tokens, with the space beside them: a template that cuts at the token and
        strips then finds nothing in its way. Space at the very edge stays outside, for templates that trim."""
        out, at = [], 0
        for match in self._wrap.finditer(text):
            start, end = match.span()
            left = at + len(text[at:start].rstrip())
            right = _SPACE.match(text, end).end()  # type: ignore[union-attr]
            if right == len(text):
                right = end
            if left == 0:
                left = start
            out += [text[at:left], marks.start, text[left:right], marks.end]
            at = right
        return "".join(out) + text[at:] if out else text


def _any_of(strings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)
