"""Small real tokenizers, trained in the test, as GGUF files and as Hugging Face directories; and slow, plain truths."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import regex
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog. the end of the story, the user said: hello hello world",
    "def f(x):\n    return x + 1\n\n\nprint(f(41), 'it''s', \"don't we'll I'VE\")\r\n\t<|user|> [INST] [/INST]",
    "naïve café über 日本語 テキスト 한국어 😀😀 👩‍👩‍👧 1234567890 2024 3.1415 ½ ²",
    "system user assistant im_start im_end end start <| |> < > tool call arguments name content",
] * 3
NASTY = [
    "",
    " ",
    "a",
    " leading",
    "trailing  ",
    "  a\n\n\n b",
    "\n\nfoo",
    "\r\n\r\n \t x",
    "12345 678",
    "a1b22c333",
    "don't I'LL we'Ve 's",
    "日本語 テキスト",
    "👩‍👩‍👧‍👦 🇩🇪 😀",
    "ﬁ½²③ 一二三",
    "def f(x):\n    return x\t\t+1\r\n\r\n",
    "\x00\x01\x7f",
    "e\u0301 é \u0344",
    "\u00a0\u3000 \u2028x",
    "٣٤٥ १२",
    "﷽﷽",
    "\ufeffhi",
    "▁under▁score ▁",
    "<0x41><0xE2>",
    "x" * 700,
    "the quick brown fox" * 20,
]


def train(*, byte_level: bool, vocab_size: int = 420) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """(vocabulary without added tokens, merges). Sentencepiece style: ▁ for spaces, bytes <0xNN> at ids 0..255."""
    tok = Tokenizer(models.BPE(byte_fallback=not byte_level))
    if byte_level:
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
        )
    else:
        tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        # Words of the corpus, each with its space in front, as sentencepiece cuts them when it learns.
        tok.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size, special_tokens=[f"<0x{b:02X}>" for b in range(256)], show_progress=False
        )
    tok.train_from_iterator(CORPUS, trainer)
    model = json.loads(tok.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def write_gguf(
    path: Path,
    tokens: list[str],
    types: list[int],
    *,
    model: str = "gpt2",
    pre: str | None = None,
    merges: list[tuple[str, str]] | None = None,
    scores: list[float] | None = None,
    template: str | None = None,
    **ids: Any,
) -> Path:
    """A GGUF file with a vocabulary and no tensors; ``ids`` are further ``tokenizer.ggml.*`` keys."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges([" ".join(m) for m in merges])
    if scores is not None:
        writer.add_token_scores(scores)
    if template is not None:
        writer.add_chat_template(template)
    for key, value in ids.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_gguf(path: Path, pre: str, control: list[str], user: list[str] = (), **keys: Any) -> Path:  # type: ignore[assignment]
    vocab, merges = train(byte_level=True)
    tokens = [*sorted(vocab, key=vocab.__getitem__), *control, *user]
    types = [1] * len(vocab) + [3] * len(control) + [4] * len(user)
    return write_gguf(path, tokens, types, pre=pre, merges=merges, **keys)


def sentencepiece_gguf(path: Path, control: list[str] = (), **keys: Any) -> Path:  # type: ignore[assignment]
    """Ids: <unk> <s> </s> 0..2, bytes 3..258, then merged pieces by rank and single characters last, like Llama's."""
    vocab, merges = train(byte_level=False)
    pieces = ["".join(m) for m in merges]
    chars = [t for t in vocab if t not in set(pieces) and not t.startswith("<0x")]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *chars, *control]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) + len(chars)), *[3] * len(control)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(chars))] + [0.0] * len(control)
    defaults = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write_gguf(path, tokens, types, model="llama", scores=scores, **{**defaults, **keys})


def hf_directory(
    path: Path,
    added: list[AddedToken | str],
    *,
    byte_level: bool = True,
    space: str = "first",
    bos: str | None = None,
    eos: str | None = None,
    adds_bos: bool = False,
    template: str | None = None,
    eos_token_id: Any = None,
) -> Path:
    """tokenizer.json and its companions. ``space``: first (Metaspace at the start), legacy (Prepend), never."""
    path.mkdir(parents=True, exist_ok=True)
    vocab, merges = train(byte_level=byte_level)
    if byte_level:
        tok = Tokenizer(models.BPE(vocab=vocab, merges=merges))
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tok.decoder = decoders.ByteLevel()
    else:
        vocab = {**vocab, "<unk>": len(vocab)}
        tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if space == "legacy":
            tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            tok.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=space, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tok.decoder = decoders.Sequence([*steps, *([] if space == "never" else [decoders.Strip(" ", 1, 0)])])
    for token in added:
        if isinstance(token, str):
            tok.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token.special:
            tok.add_special_tokens([token])
        else:
            tok.add_tokens([token])
    if adds_bos and bos is not None:
        tok.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tok.token_to_id(bos))]
        )
    tok.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if bos is not None:
        config["bos_token"] = bos
    if eos is not None:
        config["eos_token"] = eos
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if eos_token_id is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_token_id}))
    return path


def plain_byte_bpe(text: str, patterns: list[str], vocab: dict[str, int], merges: list[tuple[str, str]]) -> list[int]:
    """Byte-level BPE by the book: cut by each pattern in turn, then join the best pair until none is left."""
    from chatsvc.text.bytelevel import BYTE_TO_CHAR

    pieces = [text]
    for pattern in patterns:
        cut = []
        for piece in pieces:
            at = 0
            for match in regex.finditer(pattern, piece):
                cut += [piece[at : match.start()], match.group()]
                at = match.end()
            cut.append(piece[at:])
        pieces = [piece for piece in cut if piece]
    rank = {merge: i for i, merge in enumerate(merges)}
    ids = []
    for piece in pieces:
        word = [BYTE_TO_CHAR[byte] for byte in piece.encode()]
        while True:
            pairs = [(rank[pair], i) for i, pair in enumerate(pairwise(word)) if pair in rank]
            if not pairs:
                break
            _, i = min(pairs)
            word[i : i + 2] = [word[i] + word[i + 1]]
        ids += [vocab[token] for token in word]
    return ids


def plain_sentencepiece(text: str, tokens: list[str], types: list[int], scores: list[float]) -> list[int]:
    """Sentencepiece's BPE by the book: join the neighbours whose result scores best, leftmost first; bytes at last."""
    words = {token: i for i, (token, kind) in enumerate(zip(tokens, types)) if kind == 1}
    word = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[words[a + b]], i) for i, (a, b) in enumerate(pairwise(word)) if a + b in words]
        if not pairs:
            break
        _, i = min(pairs)
        word[i : i + 2] = [word[i] + word[i + 1]]
    ids = []
    for piece in word:
        ids += [words[piece]] if piece in words else [tokens.index(f"<0x{byte:02X}>") for byte in piece.encode()]
    return ids
