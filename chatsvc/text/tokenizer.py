"""The tokenizer: text to ids, ids to text, and no way from a user's text to a control token.

Added tokens (``<|im_end|>``, ``<s>`` ...) are matched here, not inside the ``tokenizers`` library, so that plain text
and a template's text take the same path and differ only in whether added tokens are looked for. The BPE model
underneath does not hold the added tokens at all.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import tokenizers

from chatsvc.errors import ModelError
from chatsvc.modelfiles import ModelFiles
from chatsvc.text.gguf_tokenizer import gguf_parts
from chatsvc.text.hf_tokenizer import hf_parts
from chatsvc.text.parts import TokenizerParts

_WORD = frozenset({"Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "Pc"})
_SHORT = 1000  # characters; encoded in less than a millisecond
# Unicode's White_Space, which Rust's \s means; Python's \s holds four control characters more.
_WHITE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_SPACES = re.compile(f"[{_WHITE}]*")


class Tokenizer:
    """Immutable after construction; every method may be called from several threads.

    Attributes:
        vocab_size: ids are 0 .. vocab_size - 1.
        eos_token_ids: every token that ends a generation.
        bos_token_id: None when the model has none.
        adds_bos: the model's own tokenizer puts BOS in front of a text.
        added: the added tokens, by their string.
        template_variables: ``bos_token``, ``eos_token`` ... as chat templates expect them.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._first, self._rest, self._inner = parts.first, parts.rest, parts.inner
        self._bytes = parts.token_bytes
        self.vocab_size = len(parts.token_bytes)
        self.added = {token.content: token for token in parts.added if token.content}
        self._special_ids = frozenset(token.id for token in parts.added if token.special)
        self.eos_token_ids = parts.eos_token_ids
        self.bos_token_id = parts.bos_token_id
        self.adds_bos = parts.adds_bos and parts.bos_token_id is not None
        self.strips_leading_space = parts.strips_leading_space
        self.template_variables = dict(parts.variables)
        # Leftmost, then longest: the order in which Hugging Face's matcher prefers them.
        longest_first = sorted(self.added, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: str, *, special: bool = False, bos: bool = False, continuing: bool = False) -> list[int]:
        """Ids of ``text``.

        Args:
            special: True: strings of added tokens become those tokens, as in Hugging Face's tokenizers. False: no
                text can ever become an added token.
            bos: put exactly one BOS in front, if the model's tokenizer adds one.
            continuing: the text follows other text directly, so it gets no sentencepiece space in front.
        """
        ids = self.encode_parts(self.split(text) if special else [text], continuing=continuing)
        if bos and self.adds_bos and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            ids.insert(0, self.bos_token_id)
        return ids

    def split(self, text: str) -> list[str | int]:
        """Cut ``text`` at its added tokens: strings are plain text, ints are the ids of added tokens."""
        parts: list[str | int] = []
        at = 0
        for match in self._pattern.finditer(text):
            token = self.added[match.group()]
            start, end = match.span()
            if start < at or (token.single_word and _touches_word(text, start, end)):
                continue
            if token.lstrip:
                start = at + len(text[at:start].rstrip(_WHITE))
            if token.rstrip:
                end = _SPACES.match(text, end).end()  # type: ignore[union-attr]
            if start > at:
                parts.append(text[at:start])
            parts.append(token.id)
            at = end
        if at < len(text):
            parts.append(text[at:])
        return parts

    def encode_parts(self, parts: Iterable[str | int], *, continuing: bool = False) -> list[int]:
        """Encode what :meth:`split` returns; no string in it becomes an added token.

        Args:
            continuing: the parts follow other text directly, so the first one gets no sentencepiece space in front.
        """
        ids: list[int] = []
        bpe = self._inner if continuing else self._first
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._plain(part, bpe)
            bpe = self._rest
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``. Invalid UTF-8 becomes U+FFFD. Ids outside the vocabulary: ValueError."""
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._special_ids))
        text = raw.decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text[:1] == " " else text

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one token; an added token's text. ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id} is outside the vocabulary of {self.vocab_size}")
        return self._bytes[token_id]

    def is_special(self, token_id: int) -> bool:
        """Whether decoding leaves the token out."""
        return token_id in self._special_ids

    @staticmethod
    def _plain(text: str, bpe: tokenizers.Tokenizer) -> list[int]:
        if not text:
            return []
        # JSON can carry half a surrogate pair; it is no character, and the library refuses it.
        clean = text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        if len(clean) < _SHORT:
            encoding = bpe.encode(clean, add_special_tokens=False)
        else:
            # Only the batch call releases the interpreter's lock while it works: a long prompt that is encoded in a
            # thread must not stop the event loop.
            encoding = bpe.encode_batch_fast([clean], add_special_tokens=False)[0]
        ids: list[int] = encoding.ids
        return ids


def _touches_word(text: str, start: int, end: int) -> bool:
    def is_word(char: str) -> bool:
        # Rust's \w (Unicode TS 18): letters, marks, decimal digits, letter numbers, connectors, joiners.
        return char != "" and (unicodedata.category(char) in _WORD or char in "\u200c\u200d")

    return is_word(text[start - 1 : start] if start else "") or is_word(text[end : end + 1])


def load_tokenizer(files: ModelFiles) -> Tokenizer:
    """Tokenizer of a model: from a GGUF file's metadata, or from tokenizer.json.

    Raises: ModelError when the file is missing or describes something that is not implemented.
    """
    try:
        return Tokenizer(gguf_parts(files.path) if files.format == "gguf" else hf_parts(files.path))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"the tokenizer of {files.path} cannot be built: {error}") from error
