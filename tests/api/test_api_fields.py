"""Request fields: what is accepted, what it becomes, and what is refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import httpx
import pytest
from scripted import BOS, EOS, VOCAB, ScriptedEngine, Server, overloaded
from wire import CHAT, stream, texts

from chatsvc.api.schema import ChatRequest, CompletionRequest
from chatsvc.api.seeds import Seeds
from chatsvc.api.unsupported import NEUTRAL

PLAIN = {"model": "tiny", "prompt": "hi"}
Post = Callable[..., httpx.Response]


@pytest.fixture
def chat(http: httpx.Client) -> Post:
    return lambda **fields: http.post("/v1/chat/completions", json={**CHAT, **fields})


@pytest.fixture
def plain(http: httpx.Client) -> Post:
    return lambda **fields: http.post("/v1/completions", json={**PLAIN, **fields})


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> str:
    """The answer is an error of that status about that field; returns the message."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    return error["message"]


BAD: list[tuple[str, list[str]]] = [
    ("temperature", ["999999", "-1", "NaN", "Infinity", "-Infinity", "1e309", '"1"', "true", "[]"]),
    ("top_p", ["-1", "2", "NaN", '"0.5"', "true"]),
    ("min_p", ["2", "-0.1", "NaN"]),
    ("top_k", ["-2", "1.5", '"3"', "true", "NaN"]),
    ("presence_penalty", ["-3", "1e6", "NaN", "1e309"]),
    ("frequency_penalty", ["2.1", "Infinity"]),
    ("repetition_penalty", ["0", "-1", "1e6", "NaN"]),
    ("seed", [str(2**63), str(-(2**63) - 1), str(2**200), '"7"', "1.5", "true", "1e309"]),
    ("max_tokens", ["-1", "0", "true", "1.5", '"3"', "NaN"]),
    ("min_tokens", ["-1", "true", "0.5"]),
    ("n", ["0", "-1", "17", "129", str(10**6), str(2**40), '"3"', "1.5", "true"]),
    ("best_of", [str(10**6), str(2**40), "-1", "0", '"3"', "1.5"]),
    ("stop", ['""', '["a","b","c","d","e"]', "[1]", '["a",""]', "5", '{"a":1}']),
    ("stop_token_ids", ["[-1]", f"[{VOCAB}]", "[1.5]", '["1"]', "5", f"[{2**63}]"]),
    ("logit_bias", ['{"300":1}', '{"1000000000":1}', '{"-1":1}', '{"abc":1}', '{"5":1000}', '{"5":null}', '{"5":NaN}', "[]", '{"5":"1"}', '{"٣":1}', '{"":1}', '{"1e2":1}']),  # noqa: E501
    ("stream", ['"true"', "1"]),
    ("use_beam_search", ["1", '"yes"']),
    ("length_penalty", ["NaN", '"1"', "100", "2.0"]),
    ("early_stopping", ['"always"', "1", "true"]),
    ("ignore_eos", ["1"]),
    ("priority", [str(2**31), "1.5", '"1"']),
    ("cache_salt", ["5", "[]"]),
    ("user", ["5"]),
    ("model", ["5"]),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in BAD for v in values])
def test_SA_02_SE_01_a_bad_value_is_refused_by_name(http: httpx.Client, field: str, value: str) -> None:
    for path, rest in (
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"x"}]'),
        ("/v1/completions", '"prompt":"x"'),
    ):
        model = "" if field == "model" else '"model":"tiny",'
        raw = f'{{{model}{rest},"{field}":{value}}}'
        answer = http.post(path, content=raw, headers={"content-type": "application/json"})
        assert field in refused(answer, field)


@pytest.mark.parametrize("bias", [{str(VOCAB): 1}, {str(10**9): 1}, {"-1": 1}, {"abc": 1}, {"5": 1000}, {"5": None}])
def test_SA_05_a_bias_outside_the_vocabulary_is_refused_and_hurts_nobody(
    chat: Post, plain: Post, engine: ScriptedEngine, bias: dict[str, Any]
) -> None:
    for post in (chat, plain):
        refused(post(logit_bias=bias), "logit_bias")
    assert not engine.plays
    assert chat(logit_bias={str(VOCAB - 1): 1}).status_code == chat(logit_bias=None).status_code == 200
    assert engine.plays[0].params.logit_bias == {VOCAB - 1: 1} and engine.plays[1].params.logit_bias == {}


@pytest.mark.parametrize("value", ["-1", "21", str(10**6), "true", "1.5"])
def test_SE_05_OA_08_at_most_twenty_alternatives(http: httpx.Client, value: str) -> None:
    raw = f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],"logprobs":true,"top_logprobs":{value}}}'
    refused(http.post("/v1/chat/completions", content=raw), "top_logprobs")
    refused(http.post("/v1/completions", content=f'{{"model":"tiny","prompt":"x","logprobs":{value}}}'), "logprobs")


def test_top_logprobs_needs_logprobs(chat: Post) -> None:
    refused(chat(top_logprobs=2), "top_logprobs")
    refused(chat(top_logprobs=2, logprobs=False), "top_logprobs")
    assert chat(top_logprobs=0).status_code == 200


def test_the_engine_gets_what_was_asked(chat: Post, engine: ScriptedEngine) -> None:
    answer = chat(
        temperature=0.5, top_p=0.25, top_k=7, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, logit_bias={"5": -100, "299": 1}, seed=-5, stop="never", stop_token_ids=[3, 4],
        min_tokens=2, max_tokens=9, ignore_eos=False, n=2, logprobs=True, top_logprobs=3, priority=-7, cache_salt="s",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    play = engine.plays[0]
    p = play.params
    assert (p.temperature, p.top_p, p.top_k, p.min_p) == (0.5, 0.25, 7, 0.125)
    assert (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) == (1.5, -1, 2)
    assert p.logit_bias == {5: -100, 299: 1} and p.seed == -5
    assert p.stop == ("never",) and p.stop_token_ids == {3, 4}
    assert (p.min_tokens, p.max_tokens, p.ignore_eos, p.n, p.logprobs) == (2, 9, False, 2, 3)
    assert (play.priority, play.cache_salt, play.tenant) == (-7, "s", "")


def test_defaults(chat: Post, plain: Post, engine: ScriptedEngine) -> None:
    assert chat().status_code == plain().status_code == 200
    for play in engine.plays:
        p = play.params
        assert (p.temperature, p.top_p, p.top_k, p.min_p, p.repetition_penalty) == (1.0, 1.0, 0, 0.0, 1.0)
        assert p.max_tokens == engine.limit - len(play.prompt)  # the room left, for both routes
        assert (p.n, p.logprobs, p.stop, p.min_tokens) == (1, None, (), 0)
        assert 0 <= p.seed < 2**63
    assert engine.plays[0].params.seed != engine.plays[1].params.seed


@pytest.mark.parametrize(("top_k", "seen"), [(0, 0), (-1, 0), (1, 1), (10**9, VOCAB)])
def test_SA_01_top_k(chat: Post, engine: ScriptedEngine, top_k: int, seen: int) -> None:
    assert chat(top_k=top_k).status_code == 200
    assert engine.plays[0].params.top_k == seen


def test_SA_01_extremes_that_are_allowed(chat: Post, engine: ScriptedEngine) -> None:
    for fields in ({"temperature": 1e-38}, {"temperature": 0}, {"top_p": 1e-4}, {"top_p": 1}, {"seed": 2**63 - 1}):
        assert chat(**fields).status_code == 200
    assert chat(top_p=0).status_code == 200
    assert engine.plays[-1].params.top_k == 1 and engine.plays[-1].params.top_p == 1.0


OPTIONAL_CHAT = [n for n, f in ChatRequest.model_fields.items() if not f.is_required()]
OPTIONAL_PLAIN = [n for n, f in CompletionRequest.model_fields.items() if not f.is_required()]
FOREIGN = [*NEUTRAL, "metadata", "service_tier", "prediction", "safety_identifier", "something_of_a_vendor"]


@pytest.mark.parametrize("streamed", [False, True])
def test_OA_01_null_is_absent(chat: Post, plain: Post, server: Server, streamed: bool) -> None:
    for name in [*OPTIONAL_CHAT, *FOREIGN]:
        answer = chat(**{"stream": streamed, name: None})
        assert answer.status_code == 200, (name, answer.text)
    for name in [*OPTIONAL_PLAIN, *FOREIGN]:
        answer = plain(**{"stream": streamed, name: None})
        assert answer.status_code == 200, (name, answer.text)
    nulls = dict.fromkeys([*OPTIONAL_CHAT, *FOREIGN])
    if streamed:
        message = {"role": "user", "content": "x", "name": None, "tool_calls": None, "tool_call_id": None}
        assert texts(stream(server.port, {**nulls, "model": "tiny", "messages": [message]})) == {0: "Hello 0"}
    else:
        assert chat(**nulls).json()["choices"][0]["message"]["content"] == "Hello 0"
        assert plain(**dict.fromkeys([*OPTIONAL_PLAIN, *FOREIGN])).json()["choices"][0]["text"] == "Hello 0"


ASKING: dict[str, Any] = {
    "response_format": {"type": "json_object"}, "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required", "functions": [{"name": "f"}], "function_call": {"name": "f"}, "audio": {"voice": "a"},
    "modalities": ["text", "audio"], "reasoning_effort": "high", "verbosity": "low", "web_search_options": {},
    "store": True, "moderation": {"model": "m"}, "echo": True, "suffix": "s", "prompt_logprobs": 0,
    "logits_processors": ["a"], "logit_processors": ["a"], "skip_special_tokens": False, "guided_regex": "foo**",
    "regex": "foo**",
    "typical_p": 0.5, "top_a": 0.5, "tfs": 0.5, "mirostat": 2, "mirostat_mode": 2, "no_repeat_ngram_size": 2,
    "min_new_tokens": 3, "max_new_tokens": 3, "chat_template_kwargs": {"a": 1}, "documents": [{}],
    "structured_outputs": {"json": {}}, "bad_words": ["a"], "allowed_token_ids": [1],
    "include_stop_str_in_output": True, "return_tokens_as_token_ids": True, "return_token_ids": True,
}  # fmt: skip


@pytest.mark.parametrize("name", NEUTRAL)
def test_OA_18_SE_02_PC_11_what_is_not_offered_is_refused_by_name(chat: Post, plain: Post, name: str) -> None:
    value = ASKING.get(name, "something")
    if name != "tools":  # chat has them
        refused(chat(**{name: value}), name)
    refused(plain(**{name: value}), name)
    for neutral in NEUTRAL.get(name, (1,)):
        if neutral != {}:
            assert chat(**{name: neutral}).status_code == 200
        assert plain(**{name: neutral}).status_code == 200


def test_true_is_not_one_for_neutral_values(chat: Post) -> None:
    refused(chat(store=0), "store")
    refused(chat(n=1, best_of=True), "best_of")


def test_OA_03_the_newer_cap_wins(chat: Post, engine: ScriptedEngine) -> None:
    for fields, cap in (
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 6, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 2, "max_completion_tokens": 5}, 5),
        ({"max_tokens": 2, "max_completion_tokens": None}, 2),
    ):
        answer = chat(**fields).json()
        assert answer["usage"]["completion_tokens"] == cap and answer["choices"][0]["finish_reason"] == "length"
        assert engine.plays[-1].params.max_tokens == cap
    for bad in (0, -1, 1.5, True, "3"):
        refused(chat(max_completion_tokens=bad), "max_completion_tokens")


def test_min_tokens_over_the_cap(chat: Post) -> None:
    refused(chat(min_tokens=5, max_tokens=4), "min_tokens")


def test_stream_options_without_stream(chat: Post, plain: Post) -> None:
    for post in (chat, plain):
        refused(post(stream_options={"include_usage": True}), "stream_options")
        refused(post(stream_options={}, stream=False), "stream_options")
        refused(post(stream_options={"include_usage": 1}, stream=True), "stream_options.include_usage")


# -- messages ------------------------------------------------------------------------------------------------------


def prompt_of(engine: ScriptedEngine) -> str:
    return bytes(i for i in engine.plays[-1].prompt if i < 256).decode()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
def test_OA_02_parts_of_text_are_joined(chat: Post, engine: ScriptedEngine, role: str) -> None:
    shown = "system" if role == "developer" else role
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before = [{"role": "assistant", "tool_calls": [call]}] if role == "tool" else []
    for content, text in (
        ([{"type": "text", "text": "one"}], "one"),
        ([{"type": "text", "text": "one"}, {"type": "text", "text": " two"}], "one two"),
        ([{"type": "text", "text": ""}], ""),
        ([], ""),
        ("", ""),
    ):
        message = {"role": role, "content": content, **({"tool_call_id": "c"} if before else {})}
        assert chat(messages=[*before, message]).status_code == 200
        shown_before, mark, last = prompt_of(engine).rpartition(f"{shown}: {text}assistant: ")
        assert mark and not last and bool(shown_before) == bool(before)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_OA_02_other_parts_are_refused_with_their_path(chat: Post, role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    good = {"role": "user", "content": "x"}
    text = {"type": "text", "text": "a"}
    refused(chat(messages=[good, {"role": role, "content": [text, image]}]), "messages.1.content.1.type")
    refused(chat(messages=[{"role": role, "content": [{"type": "zzz"}]}]), "messages.0.content.0.type")
    refused(chat(messages=[{"role": role, "content": [{"type": "text"}]}]), "messages.0.content.0.text")
    refused(chat(messages=[{"role": role, "content": [{"text": "a"}]}]), "messages.0.content.0.type")
    refused(chat(messages=[{"role": role, "content": [5]}]), "messages.0.content")
    refused(chat(messages=[{"role": role, "content": 5}]), "messages.0.content")
    refused(chat(messages=[{"role": role, "content": {"a": 1}}]), "messages.0.content")


def test_OA_11_assistant_and_tool_turns(chat: Post, engine: ScriptedEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}}
    for content in ({"content": ""}, {"content": None}, {}):
        history = [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [call], **content},
            {"role": "tool", "content": "r", "tool_call_id": "c1", "name": "look"},
        ]
        assert chat(messages=history).status_code == 200
        written = '<tool_call>[{"name": "look", "arguments": {"a":1}}]</tool_call>'
        assert prompt_of(engine) == f"user: qassistant: {written}tool: rassistant: "
    silent = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert chat(messages=silent).status_code == 200
    refused(chat(messages=[{"role": "user"}]), "messages.0.content")
    refused(chat(messages=[{"role": "user", "content": None}]), "messages.0.content")
    broken = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    param = "messages.0.tool_calls.0.function.arguments"
    refused(chat(messages=[{"role": "assistant", "tool_calls": [broken]}]), param)


def test_OA_11_a_result_belongs_to_a_call_before_it(chat: Post) -> None:
    ask = {"role": "user", "content": "q"}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}]}
    first, second = ({"role": "tool", "content": "r", "tool_call_id": f"c{n}"} for n in (1, 2))
    assert chat(messages=[ask, calls, second, first, ask, calls, first]).status_code == 200
    for wrong in ({**first, "tool_call_id": "c3"}, {**first, "tool_call_id": None}, {"role": "tool", "content": "r"}):
        refused(chat(messages=[wrong]), "messages.0.tool_call_id")
        refused(chat(messages=[ask, calls, first, wrong]), "messages.3.tool_call_id")
    refused(chat(messages=[ask, first, calls]), "messages.1.tool_call_id")


def test_OA_11_what_the_template_would_drop_is_refused(chat: Post) -> None:
    message = refused(chat(messages=[{"role": "user", "content": "x", "name": "ann"}]), "messages.0.name")
    assert "template" in message


def test_CT_03_a_template_that_refuses_is_400_also_when_streaming(chat: Post) -> None:
    for streamed in (False, True):
        assert "refuses" in refused(
            chat(messages=[{"role": "user", "content": "refuse me"}], stream=streamed), "messages"
        )


def test_CT_04_no_template(chat: Post) -> None:
    with Server(template=None) as server:
        answer = httpx.post(server.url + "/v1/chat/completions", json=CHAT, trust_env=False)
        assert "template" in refused(answer, "messages")
        assert httpx.post(server.url + "/v1/completions", json=PLAIN, trust_env=False).status_code == 200


def test_CT_06_continuing_the_last_message(chat: Post, engine: ScriptedEngine) -> None:
    history = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The ans"}]
    assert chat(messages=history, continue_final_message=True).status_code == 200
    assert prompt_of(engine) == "user: qassistant: The ans" and engine.plays[-1].prompt[-1] != EOS
    assert chat(messages=history).status_code == 200
    assert prompt_of(engine) == "user: qassistant: The ansassistant: "
    assert chat(messages=history, add_generation_prompt=False).status_code == 200
    assert engine.plays[-1].prompt[-1] == EOS
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(chat(messages=history, **both), "continue_final_message")
    refused(chat(continue_final_message=True), "continue_final_message")


@pytest.mark.parametrize(
    "messages", [[], {}, "x", None, [5], [[]], [{"content": "x"}], [{"role": "nobody", "content": "x"}]]
)
def test_OA_14_messages_of_the_wrong_shape(chat: Post, messages: Any) -> None:
    answer = chat(messages=messages)
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages")
    assert chat().status_code == 200


# -- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 5], [[1], "a"], [1.5], [-1], [VOCAB], [2**63], [[1, 2], [VOCAB]], [True], 5, {}, [None],
               [[[1]]], ["a"] * 65],
)  # fmt: skip
def test_SA_07_OA_14_bad_prompts(plain: Post, prompt: Any) -> None:
    refused(plain(prompt=prompt), "prompt")


def test_SA_07_CT_01_good_prompts(plain: Post, engine: ScriptedEngine) -> None:
    for prompt, ids in (
        ("a", [[BOS, 97]]),
        ("", [[BOS]]),
        ("<s>a", [[BOS, 97]]),  # CT-01: exactly one
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([VOCAB - 1], [[VOCAB - 1]]),
        ([0, 1], [[0, 1]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ):
        engine.plays.clear()
        answer = plain(prompt=prompt)
        assert answer.status_code == 200, answer.text
        assert [p.prompt for p in engine.plays] == ids
        assert [c["index"] for c in answer.json()["choices"]] == list(range(len(ids)))
        assert len({p.params.seed for p in engine.plays}) == len(ids), "equal prompts have to be independent samples"


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63 - 1, -(2**63)])
def test_a_seed_and_several_prompts(plain: Post, engine: ScriptedEngine, seed: int) -> None:
    """docs/api.md: prompt 0 has the seed itself, prompt i the first 8 bytes of BLAKE2b(seed, i)."""
    assert plain(prompt=["a"] * 3, seed=seed, n=2).status_code == 200
    derived = [struct.unpack("<q", blake2b(struct.pack("<qq", seed, i), digest_size=8).digest())[0] for i in (1, 2)]
    assert [p.params.seed for p in engine.plays] == [seed, *derived]


def test_the_servers_seed_is_the_base_of_those_that_bring_none() -> None:
    """--seed: two servers with it give the same seeds in the same order; a request's own seed is not touched."""
    found = []
    for _ in range(2):
        with Server(seeds=Seeds(5)) as server, httpx.Client(base_url=server.url, trust_env=False) as http:
            for body in ({"prompt": ["a", "a"]}, {"prompt": "a", "seed": 9}, {"prompt": "a"}):
                assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
            found.append([p.params.seed for p in server.engine.plays])
    assert found[0] == found[1] and found[0][0] == 5 and found[0][2] == 9 and len(set(found[0])) == 5


def test_too_many_choices_over_all_prompts(plain: Post) -> None:
    assert plain(prompt=["a"] * 4, n=16).status_code == 200
    refused(plain(prompt=["a"] * 5, n=16), "n")


def test_a_refusal_of_a_later_prompt_stops_the_earlier_ones(
    plain: Post, server: Server, engine: ScriptedEngine
) -> None:
    answer = plain(prompt=[[1], [2] * (engine.limit + 1)])
    assert answer.status_code == 400 and not engine.plays  # lengths are checked before anything starts
    taken = engine.generate

    def full(**kwargs: Any) -> Any:
        if len(engine.plays) == 2:
            raise overloaded()
        return taken(**kwargs)

    engine.generate = full  # type: ignore[method-assign]
    try:
        assert plain(prompt=[[1], [2], [3]]).status_code == 429
        assert [p.cancelled for p in engine.plays] == [True, True]
    finally:
        del engine.generate  # type: ignore[method-assign]
