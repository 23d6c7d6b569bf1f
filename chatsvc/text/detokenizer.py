"""Token ids to text, piece by piece, never half a character."""

from __future__ import annotations

import codecs

from chatsvc.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Joins the tokens' bytes and hands out whole characters.

    What was pushed and flushed, joined, equals ``tokenizer.decode(ids)`` for every cut. Bytes that cannot become a
    character any more are U+FFFD at once (one for each maximal invalid part, as WHATWG's decoder and Python's do).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """Append one token; returns the characters that are complete now ("" while bytes are held back)."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        return self._out(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    @property
    def pending(self) -> str:
        """The bytes that wait for the rest of their character, as :meth:`flush` would show them now."""
        held = self._decoder.getstate()[0]
        return held.decode("utf-8", "replace") if held else ""

    def flush(self) -> str:
        """The end: a cut character comes out as one U+FFFD. Push after it starts a new text."""
        text = self._out(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        self._strip = self._tokenizer.strips_leading_space
        return text

    def _out(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text[1:] if text[0] == " " else text
        return text
