"""A tokenizer from a GGUF file's metadata.

Two kinds: ``gpt2`` (byte-level BPE; ``tokenizer.ggml.pre`` names how text is cut into words) and ``llama``
(sentencepiece BPE with scores). The word patterns are those llama.cpp attaches to each name, which are those of the
models' own tokenizer.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers

from chatsvc.errors import ModelError
from chatsvc.ggufmeta import read_gguf_head
from chatsvc.text import bytelevel
from chatsvc.text.parts import AddedToken, TokenizerParts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Instruct models end a turn with these even where the file's eos key names another token.
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>"})

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# Patterns are applied one after the other, each cutting the pieces of the one before.
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_NFC = frozenset({"qwen2"})
_WHOLE_WORDS = frozenset({"llama-bpe"})  # a word that is a vocabulary entry is taken whole, without merging
_BOS_BY_DEFAULT = frozenset({"llama-bpe"})


def gguf_parts(path: Path) -> TokenizerParts:
    """Build the parts from the file's metadata. Raises: ModelError, naming the key that cannot be served."""
    meta = read_gguf_head(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelError(f"{path.name}: tokenizer.ggml.model is {kind!r}; gpt2 and llama are supported")
    tokens: list[str] = meta.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError(f"{path.name}: tokenizer.ggml.tokens is missing")
    types: list[int] = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"{path.name}: {len(tokens)} tokens but {len(types)} entries in tokenizer.ggml.token_type")
    special = (_CONTROL, _UNKNOWN)
    added = [
        AddedToken(i, token, special=kind_of in special)
        for i, (token, kind_of) in enumerate(zip(tokens, types))
        if kind_of in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]
    build = _byte_level if kind == "gpt2" else _sentencepiece
    return build(path, meta, tokens, types, added)


def _byte_level(
    path: Path, meta: dict[str, Any], tokens: list[str], types: list[int], added: list[AddedToken]
) -> TokenizerParts:
    pre = meta.get("tokenizer.ggml.pre")
    name = _ALIASES.get(str(pre), str(pre))
    if name not in _PATTERNS:
        known = ", ".join(sorted([*_PATTERNS, *_ALIASES]))
        raise ModelError(f"{path.name}: tokenizer.ggml.pre is {pre!r}, which is not implemented (known: {known})")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == _NORMAL}
    pairs = [merge.partition(" ") for merge in meta.get("tokenizer.ggml.merges") or []]
    # A merge towards a control token would let plain text become one.
    merges = [(left, right) for left, _, right in pairs if left in vocab and right in vocab and left + right in vocab]
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=name in _WHOLE_WORDS))
    if name in _NFC:
        bpe.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([*cuts, alphabet])
    raw = [
        (bytelevel.to_bytes(token) if kind == _NORMAL else None) or token.encode() for token, kind in zip(tokens, types)
    ]
    return TokenizerParts(
        first=bpe,
        rest=bpe,
        inner=bpe,
        token_bytes=raw,
        added=added,
        **_ends(meta, tokens, types, adds_bos=name in _BOS_BY_DEFAULT),
    )


def _sentencepiece(
    path: Path, meta: dict[str, Any], tokens: list[str], types: list[int], added: list[AddedToken]
) -> TokenizerParts:
    scores: list[float] = meta.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelError(f"{path.name}: {len(tokens)} tokens but {len(scores)} entries in tokenizer.ggml.scores")
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind in (_NORMAL, _BYTE)}
    words = {token: i for token, i in vocab.items() if types[i] == _NORMAL}
    unknown = next((token for token, kind in zip(tokens, types) if kind == _UNKNOWN), None)
    if unknown is not None:
        vocab[unknown] = tokens.index(unknown)
    model = models.BPE(
        vocab=vocab, merges=_merges_from_scores(words, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer = normalizers.Replace(" ", "▁")
    first = inner
    space_in_front = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    if space_in_front:
        first = tokenizers.Tokenizer(model)
        first.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw = [
        bytes([int(token[3:5], 16)]) if kind == _BYTE else token.replace("▁", " ").encode() if kind == _NORMAL
        else token.encode()
        for token, kind in zip(tokens, types)
    ]  # fmt: skip
    return TokenizerParts(
        first=first,
        rest=first,  # llama.cpp and Hugging Face's Llama conversion put the space after every added token, too
        inner=inner,
        token_bytes=raw,
        added=added,
        strips_leading_space=space_in_front,
        **_ends(meta, tokens, types, adds_bos=True),
    )


def _merges_from_scores(words: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose result scores best: the same as merges ranked by that score."""
    ranked = []
    for word, i in words.items():
        for cut in range(1, len(word)):
            left, right = word[:cut], word[cut:]
            if left in words and right in words:
                ranked.append((-scores[i], -cut, words[left], words[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _ends(meta: dict[str, Any], tokens: list[str], types: list[int], *, adds_bos: bool) -> dict[str, Any]:
    def token_id(key: str) -> int | None:
        value = meta.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) and 0 <= value < len(tokens) else None

    eos = {i for key in _END_KEYS if (i := token_id(key)) is not None}
    eos |= {i for i, token in enumerate(tokens) if types[i] == _CONTROL and token in _TURN_ENDS}
    names = {"bos_token": "bos_token_id", "eos_token": "eos_token_id"}
    names |= {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
    variables = {name: tokens[i] for name, key in names.items() if (i := token_id(key)) is not None}
    return {
        "adds_bos": bool(meta.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "bos_token_id": token_id("bos_token_id"),
        "eos_token_ids": frozenset(eos),
        "variables": variables,
    }
