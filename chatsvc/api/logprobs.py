"""Log-probabilities in OpenAI's two shapes.

A token's bytes are what it adds to the text: joined over the tokens of a choice they are the text's UTF-8 (up to what
a stop string cut away). Special tokens and the stop token id that ended the choice add nothing: a name, no bytes.
"""

from __future__ import annotations

import math
from typing import Any

from chatsvc.api.services import TextCodec
from chatsvc.scheduler.plan import SampledToken

FLOOR = -9999.0  # stands for minus infinity (and for NaN): JSON has neither


def finite(value: float | None) -> float:
    """A log-probability that JSON can carry, at least :data:`FLOOR`."""
    return max(value, FLOOR) if value is not None and math.isfinite(value) else FLOOR


class TokenNames:
    """Names and bytes of tokens, looked up once per request."""

    def __init__(self, tokenizer: TextCodec) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token_id: int) -> tuple[str, bytes]:
        """(name, bytes). The name of bytes that are no UTF-8 by themselves is their escape (``\\xf0\\x9f``)."""
        known = self._known.get(token_id)
        if known is None:
            # A model may have more rows than its tokenizer has tokens.
            raw = self._tokenizer.token_bytes(token_id) if token_id < self._tokenizer.vocab_size else b""
            try:
                name = raw.decode("utf-8")
            except UnicodeDecodeError:
                name = "".join(f"\\x{b:02x}" for b in raw)
            if self._tokenizer.is_special(token_id):
                raw = b""
            known = self._known[token_id] = (name, raw)
        return known


def chat_content(
    tokens: tuple[SampledToken, ...], top: int, names: TokenNames, end: int | None
) -> list[dict[str, Any]]:
    """Entries of ``logprobs.content``.

    Args:
        top: alternatives to report for each token.
        end: index in ``tokens`` of the token that ended the choice without adding text, or None.
    """
    entries = []
    for i, token in enumerate(tokens):
        name, raw = names(token.token_id)
        alternatives = []
        for other, logprob in token.top[:top]:
            other_name, other_raw = names(other)
            alternatives.append({"token": other_name, "logprob": finite(logprob), "bytes": list(other_raw)})
        entries.append(
            {
                "token": name,
                "logprob": finite(token.logprob),
                "bytes": [] if i == end else list(raw),
                "top_logprobs": alternatives,
            }
        )
    return entries


class CompletionLogprobs:
    """The older shape, of one choice: ``{tokens, token_logprobs, top_logprobs, text_offset}``, in order of arrival."""

    def __init__(self, top: int, names: TokenNames) -> None:
        self._top = top
        self._names = names
        self._characters = 0  # characters begun so far: every byte but UTF-8 continuation bytes begins one

    def add(self, tokens: tuple[SampledToken, ...], end: int | None) -> dict[str, Any]:
        """The entries of the next tokens; ``end`` as in :func:`chat_content`."""
        out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for i, token in enumerate(tokens):
            name, raw = self._names(token.token_id)
            out["tokens"].append(name)
            out["token_logprobs"].append(finite(token.logprob))
            best = {self._names(other)[0]: finite(logprob) for other, logprob in reversed(token.top[: self._top])}
            best[name] = finite(token.logprob)
            out["top_logprobs"].append(dict(sorted(best.items(), key=lambda item: -item[1])))
            inside = bool(raw) and raw[0] & 0xC0 == 0x80
            out["text_offset"].append(self._characters - (1 if inside and self._characters else 0))
            if i != end:
                self._characters += sum(1 for b in raw if b & 0xC0 != 0x80)
        return out
