"""A tokenizer from a Hugging Face directory: tokenizer.json, with the end tokens from the files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from chatsvc.errors import ModelError
from chatsvc.text import bytelevel
from chatsvc.text.parts import AddedToken, TokenizerParts


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, or {} when there is no such file. Raises: ModelError when it is broken."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def token_text(value: Any) -> str | None:
    """A token as the configuration files write it: a string, or an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def hf_parts(path: Path) -> TokenizerParts:
    """Build the parts from a directory. Raises: ModelError, naming what cannot be served."""
    data = read_json(path / "tokenizer.json")
    if not data:
        raise ModelError(f"{path} has no tokenizer.json; tokenizer.model alone is not supported")
    model = data["model"]
    # Old files leave the type out.
    if model.get("type", "BPE" if "merges" in model else None) != "BPE":
        raise ModelError(f"{path}: tokenizer model type {model.get('type')!r} is not implemented (BPE is)")
    added = [
        AddedToken(
            token["id"], token["content"], token.get("special", False), token.get("lstrip", False),
            token.get("rstrip", False), token.get("single_word", False),
        )
        for token in data.get("added_tokens") or []
    ]  # fmt: skip
    vocab: dict[str, int] = dict(model["vocab"])
    size = max([*vocab.values(), *(token.id for token in added)]) + 1
    byte_level = _mentions(data.get("pre_tokenizer"), "ByteLevel") or _mentions(data.get("decoder"), "ByteLevel")
    raw = [b""] * size
    for text, i in vocab.items():
        raw[i] = _raw(text, byte_level, bool(model.get("byte_fallback")))
    for token in added:
        raw[token.id] = token.content.encode()
    _without_added(model, added)
    first, rest, inner = _three(data)
    config = read_json(path / "tokenizer_config.json")
    variables = _variables(path, config)
    by_text = {**vocab, **{token.content: token.id for token in added}}
    bos, adds_bos = _bos(data, config, by_text, variables)
    return TokenizerParts(
        first=first,
        rest=rest,
        inner=inner,
        token_bytes=raw,
        added=added,
        adds_bos=adds_bos,
        bos_token_id=bos,
        eos_token_ids=_end_tokens(path, by_text, variables),
        strips_leading_space=_strips(data.get("decoder")),
        variables=variables,
    )


def _raw(text: str, byte_level: bool, byte_fallback: bool) -> bytes:
    if byte_level:
        found = bytelevel.to_bytes(text)
        return text.encode() if found is None else found
    if byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes([int(text[3:5], 16)])
    return text.replace("▁", " ").encode()


def _without_added(model: dict[str, Any], added: list[AddedToken]) -> None:
    """Take the added tokens out of the BPE model, so that no plain text can be merged into one."""
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ", 1)) for m in model["merges"]]
    parts = {piece for merge in merges for piece in (*merge, "".join(merge))}
    special = {token.content for token in added if token.special}
    # An added token that is no control token may be an ordinary word of the vocabulary, too.
    gone = special | {token.content for token in added if token.content not in parts}
    gone.discard(model.get("unk_token"))
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in gone}
    model["merges"] = [list(m) for m in merges if special.isdisjoint((*m, "".join(m)))]


def _three(data: dict[str, Any]) -> tuple[tokenizers.Tokenizer, tokenizers.Tokenizer, tokenizers.Tokenizer]:
    """BPE for the start of a text, after an added token, and inside running text; one model under all three."""
    data = {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    first = tokenizers.Tokenizer.from_str(json.dumps(data))
    rest = _variant(first, data, keep_always=True)
    inner = _variant(first, data, keep_always=False)
    return first, rest, inner


def _variant(first: tokenizers.Tokenizer, data: dict[str, Any], *, keep_always: bool) -> tokenizers.Tokenizer:
    steps = {key: _no_prefix(data.get(key), keep_always) for key in ("normalizer", "pre_tokenizer")}
    if all(steps[key] == data.get(key) for key in steps):
        return first
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    shell = tokenizers.Tokenizer.from_str(json.dumps({**data, **steps, "model": empty}))
    variant = tokenizers.Tokenizer(first.model)  # shares the vocabulary
    if shell.normalizer is not None:
        variant.normalizer = shell.normalizer
    if shell.pre_tokenizer is not None:
        variant.pre_tokenizer = shell.pre_tokenizer
    return variant


def _no_prefix(step: Any, keep_always: bool) -> Any:
    """A normalizer or pre-tokenizer without the space it puts in front.

    keep_always: only the kind that acts at the start of the whole text is taken away, not the kind that acts after
    every added token.
    """
    if not isinstance(step, dict):
        return step
    kind = step.get("type")
    if kind == "Sequence":
        key = "normalizers" if "normalizers" in step else "pretokenizers"
        inner = [_no_prefix(part, keep_always) for part in step[key]]
        return {**step, key: [part for part in inner if part is not None]}
    if kind == "Metaspace" and (step.get("prepend_scheme") == "first" or not keep_always):
        return {**step, "prepend_scheme": "never", "add_prefix_space": False}
    if kind == "Prepend" and not keep_always:
        return None
    if kind == "ByteLevel" and step.get("add_prefix_space") and not keep_always:
        return {**step, "add_prefix_space": False}
    return step


def _mentions(step: Any, kind: str) -> bool:
    if isinstance(step, dict):
        return step.get("type") == kind or any(_mentions(part, kind) for part in step.values())
    return isinstance(step, list) and any(_mentions(part, kind) for part in step)


def _strips(decoder: Any) -> bool:
    """Whether decoding drops a space at the very start."""
    if isinstance(decoder, list):
        return any(_strips(part) for part in decoder)
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Strip":
        return bool(decoder.get("content") == " " and decoder.get("start", 0) > 0)
    if decoder.get("type") == "Metaspace":
        return bool(decoder.get("prepend_scheme", "always") != "never")
    return any(_strips(part) for part in decoder.values())


def _variables(path: Path, config: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in (read_json(path / "special_tokens_map.json"), config):
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            text = token_text(source.get(name))
            if text is not None:
                found[name] = text
    return found


def _bos(
    data: dict[str, Any], config: dict[str, Any], by_text: dict[str, int], variables: dict[str, str]
) -> tuple[int | None, bool]:
    bos = by_text.get(variables.get("bos_token", ""))
    if isinstance(config.get("add_bos_token"), bool):
        return bos, config["add_bos_token"]
    return bos, bos is not None and _template_prefix(data.get("post_processor")) == variables["bos_token"]


def _template_prefix(post: Any) -> str | None:
    """The special token that the post-processor puts in front of a single text."""
    if not isinstance(post, dict):
        return None
    if post.get("type") == "TemplateProcessing":
        begin = (post.get("single") or [{}])[0]
        found = begin.get("SpecialToken", {}).get("id")
        return found if isinstance(found, str) else None
    return next((p for part in post.get("processors") or [] if (p := _template_prefix(part)) is not None), None)


def _end_tokens(path: Path, by_text: dict[str, int], variables: dict[str, str]) -> frozenset[int]:
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        ends.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    eos = variables.get("eos_token")
    if eos in by_text:
        ends.add(by_text[eos])
    return frozenset(ends)
