"""Random bodies and random answers against rules that always hold."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted import EOS, TOKENIZER, Server
from wire import events, strict, texts

from chatsvc.api.answers_schema import ChatChunk, ChatCompletion, ErrorAnswer, PlainCompletion
from chatsvc.api.frames import DONE, ChatShape, CompletionShape, dumps, dumps_in_slices
from chatsvc.api.logprobs import TokenNames
from chatsvc.api.schema import ChatMessage, ChatRequest, CompletionRequest, ContentPart
from chatsvc.api.unsupported import NEUTRAL
from chatsvc.engine.output import Delta, OutputLog
from chatsvc.scheduler.plan import SampledToken
from chatsvc.text.detokenizer import IncrementalDetokenizer

NAMES = sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, *NEUTRAL, "best_of", "other"})
INNER = sorted({*ChatMessage.model_fields, *ContentPart.model_fields, "include_usage", "function", "5", "-1"})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-2, 5)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["tiny", "user", "system", "assistant", "tool", "text", "image_url", "hi", ""])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool"]), "content": st.just("x") | JSON},
    optional={n: st.none() | JSON for n in INNER if n not in ("role", "content")},
)
PROMPT = st.text() | st.lists(st.text(max_size=3) | st.integers(-1, 300), max_size=3) | JSON
BASE = st.fixed_dictionaries(
    {"model": st.just("tiny"), "messages": st.lists(MESSAGE, min_size=1, max_size=3), "prompt": PROMPT}
)
EXTRA = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    BASE,
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3),
    st.sampled_from(["chat/completions", "completions"]),
)
def test_SH_01_no_body_is_ever_a_500(server: Server, http: httpx.Client, base: Any, extra: Any, path: str) -> None:
    try:
        raw = json.dumps({**base, **extra})
        raw.encode()
    except UnicodeEncodeError:
        return
    answer = http.post(f"/v1/{path}", content=raw)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert events(answer.content)[-1] == "[DONE]"
    elif answer.status_code == 200:
        (ChatCompletion if path.startswith("chat") else PlainCompletion).model_validate(strict(answer.content))
    else:
        assert answer.status_code in (400, 404), answer.text
        ErrorAnswer.model_validate(strict(answer.content))


def finished_log(ids: list[int], end: str) -> OutputLog:
    """What the engine would have logged."""
    log, text = OutputLog(0), IncrementalDetokenizer(TOKENIZER)  # type: ignore[arg-type]
    for token in ids:
        log.tokens.append(SampledToken(token, -0.5, ((token, -0.5), (65, -1.0))))
        log.pieces.append(text.push(token))
    if end == "stop":
        log.tokens.append(SampledToken(EOS, -0.5, ()))
        log.pieces.append("")
        log.stop_reason = EOS
    log.tail = text.flush()
    log.finish_reason = "stop" if end == "stop" else "length"
    return log


CUTS = st.lists(st.integers(1, 4), max_size=20)
TEXT = st.text(max_size=12).map(lambda t: list(t.encode())) | st.lists(st.integers(0, 255), max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    TEXT, st.sampled_from(["stop", "length"]), st.lists(st.integers(1, 4), max_size=20), st.sampled_from([None, 0, 2])
)
@pytest.mark.parametrize("kind", [ChatShape, CompletionShape])
def test_any_cut_of_an_answer_is_the_whole_answer(
    kind: Any, ids: list[int], end: str, cuts: list[int], logprobs: int | None
) -> None:
    log = finished_log(ids, end)
    whole = kind("id", "tiny", TokenNames(TOKENIZER), frozenset({EOS}), logprobs=logprobs).body([log], {})
    shape = kind("id", "tiny", TokenNames(TOKENIZER), frozenset({EOS}), logprobs=logprobs)
    raw, at = b"", 0
    while True:
        to = min(at + (cuts.pop() if cuts else 1), len(log.tokens))
        last = to == len(log.tokens)
        text = "".join(log.pieces[at:to]) + (log.tail if last else "")
        raw += shape.chunk(0, Delta(0, text, tuple(log.tokens[at:to]), to, log.finish_reason if last else None), log)
        at = to
        if last:
            break
    seen = events(raw + DONE)[:-1]
    chat = kind is ChatShape
    for e in seen:
        (ChatChunk if chat else PlainCompletion).model_validate(e)
    choice = strict(dumps(whole))["choices"][0]
    assert texts(seen) == {0: choice["message"]["content"] if chat else choice["text"]} == {0: log.text}
    choices = [e["choices"][0] for e in seen]
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == [choice["finish_reason"]]
    assert choices[-1]["finish_reason"]
    parts = [c["logprobs"] for c in choices if c["logprobs"]]
    for key in ("content",) if chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [v for p in parts for v in p[key]]
        if logprobs is None:
            assert choice["logprobs"] is None and not parts
        elif parts or choice["logprobs"]:
            assert joined == choice["logprobs"][key]
    if chat and logprobs is not None:
        assert (
            bytes(b for t in choice["logprobs"]["content"] for b in t["bytes"]).decode("utf-8", "replace") == log.text
        )
    if not chat and logprobs is not None and choice["logprobs"] and "\ufffd" not in log.text:
        for offset, name in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
            assert name.startswith(("\\x", "<|end|>")) or log.text[offset : offset + len(name)] == name


@settings(max_examples=60, deadline=None)
@given(
    st.recursive(st.none() | st.integers() | st.text(), lambda i: st.lists(i) | st.dictionaries(st.text(), i)),
    st.data(),
)
def test_slices_are_the_same_json(value: Any, data: st.DataObject) -> None:
    try:
        dumps(value).encode()
    except UnicodeEncodeError:
        return
    assert strict(dumps_in_slices(value)) == value == strict(dumps(value))
    long = [value] * data.draw(st.integers(60, 200))
    assert strict(dumps_in_slices({"a": long})) == {"a": long}
