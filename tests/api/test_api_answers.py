"""Whole answers: shapes, usage, finish reasons, log-probabilities, token routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from scripted import BOS, EOS, VOCAB, ScriptedEngine, Server, text_script
from wire import CHAT, Connection, counts, stream, strict, texts

from chatsvc.api.answers_schema import ChatCompletion, PlainCompletion, Text, Tokens

CHAT_PATH = "/v1/chat/completions"
PLAIN = {"model": "tiny", "prompt": "hi"}
EMOJI = "né 👩‍👦 שלום"


def test_the_documented_shapes(http: httpx.Client) -> None:
    for extra in ({}, {"n": 3}, {"stop": "lo"}, {"max_tokens": 2}):
        ChatCompletion.model_validate(strict(http.post(CHAT_PATH, json={**CHAT, **extra}).content))
        PlainCompletion.model_validate(strict(http.post("/v1/completions", json={**PLAIN, **extra}).content))


@pytest.mark.parametrize(
    ("script", "fields", "finish", "tokens", "text"),
    [
        ("ab", {}, "stop", 3, "ab"),  # the end token counts
        ("ab", {"max_tokens": 3}, "stop", 3, "ab"),  # the end token on the last allowed place
        ("ab", {"max_tokens": 2}, "length", 2, "ab"),
        ("abcd", {"stop": "cd", "max_tokens": 4}, "stop", 4, "ab"),  # a stop string on the last allowed place
        ("abcd", {"stop": "b"}, "stop", 2, "a"),
        ("abcd", {"stop": ["zz", "bc", "bcd"]}, "stop", 3, "a"),
        ("abcd", {"stop_token_ids": [99]}, "stop", 3, "ab"),
        ("", {}, "stop", 1, ""),
        ("a" * 17, {"max_tokens": 17}, "length", 17, "a" * 17),
    ],
)
def test_OA_04_OA_16_finish_reason_and_counts_are_the_same_in_both_modes(
    http: httpx.Client,
    server: Server,
    engine: ScriptedEngine,
    script: str,
    fields: Any,
    finish: str,
    tokens: int,
    text: str,
) -> None:
    engine.script = text_script(script)
    for path, base in ((CHAT_PATH, CHAT), ("/v1/completions", PLAIN)):
        for logprobs in ({}, {"logprobs": True if path == CHAT_PATH else 1}):
            body = {**base, **fields, **logprobs}
            whole = http.post(path, json=body).json()
            seen = stream(server.port, {**body, "stream_options": {"include_usage": True}}, path)
            choice = whole["choices"][0]
            assert choice["finish_reason"] == finish
            assert (choice["message"]["content"] if path == CHAT_PATH else choice["text"]) == text
            usage = whole["usage"]
            assert usage["completion_tokens"] == tokens
            assert usage["total_tokens"] == usage["prompt_tokens"] + tokens
            assert counts(seen[-2]["usage"]) == counts(usage) and texts(seen) == {0: text}
            assert [e["choices"][0]["finish_reason"] for e in seen[:-2]][-1] == finish
            if logprobs and path == CHAT_PATH:
                assert len(choice["logprobs"]["content"]) == tokens
                streamed = [t for e in seen[:-2] for t in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
                assert streamed == choice["logprobs"]["content"]
            elif logprobs:
                assert len(choice["logprobs"]["tokens"]) == tokens
                for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    parts = [e["choices"][0]["logprobs"] for e in seen[:-2]]
                    assert [v for p in parts if p for v in p[key]] == choice["logprobs"][key]


def test_PC_09_cached_tokens_streamed_and_whole(http: httpx.Client, server: Server, engine: ScriptedEngine) -> None:
    for cached, n in ((0, 1), (8, 1), (8, 2)):
        engine.cached = cached
        whole = http.post(CHAT_PATH, json={**CHAT, "n": n}).json()["usage"]
        seen = stream(server.port, {**CHAT, "n": n, "stream_options": {"include_usage": True}})
        assert whole["prompt_tokens_details"] == {"cached_tokens": cached} and counts(seen[-2]["usage"]) == counts(
            whole
        )
        assert whole["prompt_tokens"] == len(engine.plays[-1].prompt)  # once, not n times
        assert whole["completion_tokens"] == 8 * n
    engine.cached = 1
    many = http.post("/v1/completions", json={"model": "tiny", "prompt": [[1, 2], [3, 4, 5]]}).json()["usage"]
    assert many["prompt_tokens"] == 5 and many["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("top", [None, 0, 1, 4, 20])
def test_OA_08_chat_logprobs_join_to_the_text(http: httpx.Client, engine: ScriptedEngine, top: int | None) -> None:
    engine.script = text_script(EMOJI)
    answer = http.post(CHAT_PATH, json={**CHAT, "logprobs": True, "top_logprobs": top})
    choice = strict(answer.content)["choices"][0]
    ChatCompletion.model_validate(answer.json())
    content = choice["logprobs"]["content"]
    assert bytes(b for t in content for b in t["bytes"]).decode() == choice["message"]["content"] == EMOJI
    assert all(len(t["top_logprobs"]) == min(top or 0, 4) for t in content)
    assert [t["token"] for t in content[:2]] == ["n", "\\xc3"]  # half a character is named by its byte
    assert content[-1]["token"] == "<|end|>" and content[-1]["bytes"] == []
    assert all(t["logprob"] == -0.25 for t in content)
    if top and top >= 4:
        special, impossible, unknown = content[0]["top_logprobs"][1:]
        assert special == {"token": "<|end|>", "logprob": -3.0, "bytes": []}
        assert impossible["logprob"] == unknown["logprob"] == -9999.0  # OA-09


@pytest.mark.parametrize("top", [0, 2, 20])
def test_OA_08_OA_09_plain_logprobs(http: httpx.Client, engine: ScriptedEngine, top: int) -> None:
    engine.script = text_script("né!")
    choice = strict(http.post("/v1/completions", json={**PLAIN, "logprobs": top}).content)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["n", "\\xc3", "\\xa9", "!", "<|end|>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"] == [-0.25] * 5
    for i, name in enumerate(logprobs["tokens"]):
        best = logprobs["top_logprobs"][i]
        assert best[name] == -0.25 and len(best) <= top + 1
        assert list(best.values()) == sorted(best.values(), reverse=True)


def test_no_logprobs_unless_asked(http: httpx.Client, engine: ScriptedEngine) -> None:
    for fields in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}):
        assert http.post(CHAT_PATH, json={**CHAT, **fields}).json()["choices"][0]["logprobs"] is None
    assert http.post("/v1/completions", json=PLAIN).json()["choices"][0]["logprobs"] is None
    assert [p.params.logprobs for p in engine.plays] == [None] * 4


def test_ids_past_the_tokenizers_own_have_empty_names(http: httpx.Client, engine: ScriptedEngine) -> None:
    """A model may have more rows than its tokenizer has tokens; they can be among the alternatives."""
    from scripted import TOKENIZER

    from chatsvc.api.logprobs import TokenNames

    assert TokenNames(TOKENIZER)(VOCAB + 5) == ("", b"")


def test_ST_05_whole_and_streamed_agree_on_broken_bytes(
    http: httpx.Client, server: Server, engine: ScriptedEngine
) -> None:
    engine.script = lambda prompt, params, choice: [0x80] * 50 + [0xF0, 0x9F, 65, EOS]
    for burst in (1, 7, 100):
        engine.burst = burst
        whole = http.post(CHAT_PATH, json=CHAT).json()["choices"][0]["message"]["content"]
        assert texts(stream(server.port, CHAT)) == {0: whole}
        assert whole.startswith("\ufffd" * 50) and whole.endswith("A")


def test_a_large_answer_with_logprobs(http: httpx.Client, engine: ScriptedEngine) -> None:
    engine.script, engine.burst = text_script("z" * 400), 500
    answer = strict(http.post(CHAT_PATH, json={**CHAT, "n": 16, "logprobs": True, "top_logprobs": 4}).content)
    ChatCompletion.model_validate(answer)
    assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [401] * 16


# -- tokens --------------------------------------------------------------------------------------------------------


def test_tokenize_is_what_a_completion_uses(http: httpx.Client, engine: ScriptedEngine) -> None:
    def tokens(**body: Any) -> list[int]:
        answer = http.post("/tokenize", json=body).json()
        Tokens.model_validate(answer)
        assert answer["count"] == len(answer["tokens"]) and answer["max_model_len"] == engine.limit
        return list(answer["tokens"])

    http.post("/v1/completions", json={"model": "tiny", "prompt": "é<s>"})
    assert tokens(prompt="é<s>", model="tiny") == engine.plays[-1].prompt
    http.post(CHAT_PATH, json=CHAT)
    assert tokens(messages=CHAT["messages"]) == engine.plays[-1].prompt
    assert tokens(prompt="a", add_special_tokens=False) == [97]
    assert tokens(prompt="a", add_special_tokens=None) == [BOS, 97]
    assert tokens(prompt="", add_special_tokens=False) == []
    back = http.post("/detokenize", json={"tokens": tokens(prompt="é")}).json()
    Text.model_validate(back)
    assert back == {"prompt": "<s>é"}


@pytest.mark.parametrize(
    ("path", "body", "param", "status"),
    [
        ("/tokenize", {}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "messages": CHAT["messages"]}, "prompt", 400),
        ("/tokenize", {"prompt": 5}, "prompt", 400),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model", 404),
        ("/tokenize", {"messages": []}, "messages", 400),
        ("/detokenize", {}, "tokens", 400),
        ("/detokenize", {"tokens": [-1]}, "tokens", 400),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens", 400),
        ("/detokenize", {"tokens": [2**63]}, "tokens", 400),
        ("/detokenize", {"tokens": ["1"]}, "tokens", 400),
        ("/detokenize", {"tokens": [True]}, "tokens", 400),
    ],
)
def test_bad_token_requests(http: httpx.Client, path: str, body: Any, param: str, status: int) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status and answer.json()["error"]["param"] == param, answer.text


def test_detokenize_nothing(http: httpx.Client) -> None:
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_a_cancelled_whole_answer_keeps_what_there_is(
    server: Server, engine: ScriptedEngine, http: httpx.Client
) -> None:
    for path, body in ((CHAT_PATH, CHAT), ("/v1/completions", PLAIN)):
        server.call(engine.gate.clear)
        engine.plays.clear()
        with Connection(server.port) as c:
            c.post(path, body)
            server.until(lambda e: e.plays)
            assert http.post(f"{CHAT_PATH}/{engine.plays[0].request_id}/cancel").status_code == 200
            status, _, raw = c.answer()
            choice = strict(raw)["choices"][0]
            assert (status, choice["finish_reason"], choice["cancelled"]) == (200, "stop", True)
        server.call(engine.gate.set)
