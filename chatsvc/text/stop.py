"""Stop strings in a stream of text.

All stop strings are followed at once by one automaton (Aho and Corasick, "Efficient string matching", 1975), so the
work is one step a character however long the strings are.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Releases text until a stop string is complete.

    The match that is complete first ends the text (of two that end on the same character, the longer one). So the
    answer depends on the text alone and never on how it was cut into pieces, and a generation never has to go on to
    find out which one it was. Only the longest end of the text that is a proper prefix of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        # Node 0 is "nothing matched yet"; a node is a prefix of some stop string.
        self._next: list[dict[str, int]] = [{}]
        self._depth: list[int] = [0]
        self._fail: list[int] = [0]
        self._match: list[str | None] = [None]
        for stop in stops:
            if stop:
                self._insert(stop)
        self._link()
        self._node = 0
        # A queue of pieces, not one string: a long held-back text must not be copied for each new character.
        self._held: deque[str] = deque()
        self._held_length = 0
        self.matched: str | None = None

    def fresh(self) -> StopMatcher:
        """A matcher of the same strings for another text; building the automaton is the dear part, and it is shared."""
        other = copy.copy(self)
        other._node, other._held, other._held_length, other.matched = 0, deque(), 0, None
        return other

    def push(self, text: str) -> tuple[str, str | None]:
        """Append text; returns (text that may be shown now, the stop string if one is complete now).

        After a match everything that follows is dropped: ("", the same stop string).
        """
        if self.matched is not None:
            return "", self.matched
        if len(self._next) == 1:
            return text, None
        node = self._node
        for i, char in enumerate(text):
            node = self._step(node, char)
            found = self._match[node]
            if found is not None:
                self.matched = found
                return self._release(text[: i + 1], keep=len(found)), found
        self._node = node
        return self._release(text, keep=self._depth[node]), None

    @property
    def held(self) -> str:
        """The end of the text that may be the beginning of a stop string."""
        return "".join(self._held) if self._held and self.matched is None else ""

    def flush(self) -> str:
        """The end of the text: what was held back, for nothing can complete it any more."""
        if self.matched is not None:
            return ""
        self._node = 0
        return self._release("", keep=0)

    def _release(self, text: str, keep: int) -> str:
        """Append ``text`` to what is held back and take out all but the last ``keep`` characters."""
        self._held.append(text)
        self._held_length += len(text)
        out: list[str] = []
        while self._held_length > keep:
            piece = self._held.popleft()
            spare = self._held_length - keep
            if len(piece) > spare:
                self._held.appendleft(piece[spare:])
                piece = piece[:spare]
            out.append(piece)
            self._held_length -= len(piece)
        return "".join(out)

    def _step(self, node: int, char: str) -> int:
        while char not in self._next[node]:
            if node == 0:
                return 0
            node = self._fail[node]
        return self._next[node][char]

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._next[node]:
                self._next[node][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
                self._match.append(None)
            node = self._next[node][char]
        self._match[node] = stop

    def _link(self) -> None:
        """Breadth first: where to go on when the next character does not fit, and which shorter match a node holds."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], char)
                queue.append(child)
            if self._match[node] is None:
                self._match[node] = self._match[self._fail[node]]
