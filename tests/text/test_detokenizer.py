"""Streamed text equals whole text for every cut, and never holds half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import sentencepiece_gguf

from chatsvc.modelfiles import ModelFiles
from chatsvc.text.detokenizer import IncrementalDetokenizer
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer

SETTINGS = settings(max_examples=200, deadline=None)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = sentencepiece_gguf(tmp_path_factory.mktemp("spm") / "m.gguf")
    return load_tokenizer(ModelFiles(path, "gguf", "m"))


def pieces(tok: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detok = IncrementalDetokenizer(tok, skip)
    return [*(detok.push(i) for i in ids), detok.flush()]


EMOJI = "né 👩‍👩‍👧‍👦 日本語 שלום 🇩🇪!"


@pytest.mark.parametrize("which", ["smollm", "spm"])
def test_no_replacement_character_unless_the_text_is_cut(which: str, request: pytest.FixtureRequest) -> None:
    tok: Tokenizer = request.getfixturevalue(which)
    ids = tok.encode(EMOJI)
    out = pieces(tok, ids)
    assert "".join(out) == EMOJI
    assert all("\ufffd" not in piece for piece in out)
    assert out.count("") > 5, "some tokens end inside a character"
    for end in range(len(ids) + 1):
        streamed = pieces(tok, ids[:end])
        assert "".join(streamed) == tok.decode(ids[:end])
        assert "\ufffd" not in "".join(streamed[:-1])
        assert streamed[-1] in ("", "\ufffd"), "a cut character is one replacement character"


@pytest.mark.parametrize("which", ["smollm", "spm"])
def test_any_ids_stream_as_they_decode(which: str, request: pytest.FixtureRequest) -> None:
    tok: Tokenizer = request.getfixturevalue(which)
    # Mostly the byte tokens: those make the invalid sequences.
    single = [i for i in range(tok.vocab_size) if len(tok.token_bytes(i)) == 1]
    some = st.one_of(st.sampled_from(single), st.integers(0, tok.vocab_size - 1))

    @SETTINGS
    @given(ids=st.lists(some, max_size=20), skip=st.booleans())
    def check(ids: list[int], skip: bool) -> None:
        assert "".join(pieces(tok, ids, skip)) == tok.decode(ids, skip_special=skip)

    check()


def test_bytes_that_are_surely_invalid_do_not_stall(spm: Tokenizer) -> None:
    byte = next(i for i in range(spm.vocab_size) if spm.token_bytes(i) == b"\xa9")
    detok = IncrementalDetokenizer(spm)
    assert [detok.push(byte) for _ in range(50)] == ["\ufffd"] * 50
    lead = next(i for i in range(spm.vocab_size) if spm.token_bytes(i) == b"\xf0")
    letter = next(i for i in range(spm.vocab_size) if spm.token_bytes(i) == b"x")
    assert [detok.push(lead), detok.push(letter)] == ["", "\ufffdx"]


def test_special_tokens_are_left_out_or_shown(smollm: Tokenizer) -> None:
    ids = [1, *smollm.encode("hi"), 2]
    assert "".join(pieces(smollm, ids)) == "hi"
    assert "".join(pieces(smollm, ids, skip=False)) == "<|im_start|>hi<|im_end|>"


def test_a_special_token_inside_a_character_does_not_break_it(smollm: Tokenizer) -> None:
    first, *rest = smollm.encode("👩")
    ids = [first, 2, *rest]
    assert "".join(pieces(smollm, ids)) == smollm.decode(ids) == "👩"
    assert "".join(pieces(smollm, ids, skip=False)) == smollm.decode(ids, skip_special=False)


def test_only_the_first_space_goes(spm: Tokenizer) -> None:
    ids = [1, *spm.encode("the quick"), 2, *spm.encode("the")]
    assert "".join(pieces(spm, ids)) == spm.decode(ids) == "the quick the"
