"""What a tokenizer is made of, whatever file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tokenizers


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is matched as a string before BPE. The flags mean what they mean in Hugging Face's tokenizer.json.

    Attributes:
        special: a control token, left out of decoded text. False: visible text, such as a tool-call mark.
    """

    id: int
    content: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a loader hands over.

    Attributes:
        first: BPE for the text at the start of a prompt (sentencepiece models put a space in front there).
        rest: BPE for text that follows an added token. May be the same object.
        inner: BPE that never puts a space in front.
        token_bytes: raw bytes of every id; b"" for ids that stand for nothing.
        strips_leading_space: decoding drops one space at the very start (sentencepiece).
    """

    first: tokenizers.Tokenizer
    rest: tokenizers.Tokenizer
    inner: tokenizers.Tokenizer
    token_bytes: Sequence[bytes]
    added: Sequence[AddedToken]
    adds_bos: bool
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    strips_leading_space: bool = False
    variables: dict[str, str] = field(default_factory=dict)
