"""best_of and beam search as a client sees them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from scripted import TOKENIZER, VOCAB, Server
from wire import stream, texts

from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "once upon", "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    executor = SimulatedExecutor(SimulatedConfig(200, 16, VOCAB, 1000), hashed_token(97, 123))
    engine = AsyncEngine(EngineConfig(16), executor, TOKENIZER)  # type: ignore[arg-type]
    with Server(engine=engine) as server:
        server.wait(engine.start())
        yield server
        server.wait(engine.stop())


def post(server: Server, **fields: object) -> httpx.Response:
    return httpx.post(server.url + PATH, json={**BODY, **fields}, timeout=30, trust_env=False)


def test_best_of_returns_n_and_counts_all(server: Server) -> None:
    body = post(server, n=2, best_of=5, seed=1).json()
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == 5 * 6
    assert body["choices"][0]["logprobs"] is None, "the ranking's log-probabilities are nobody's business"


def test_beam_search_streamed_equals_whole_and_text_comes_at_the_end(server: Server) -> None:
    fields = {"n": 2, "best_of": 4, "use_beam_search": True, "length_penalty": 0.5}
    whole = post(server, **fields).json()
    seen = stream(server.port, {**BODY, **fields}, PATH)
    assert texts(seen) == {c["index"]: c["text"] for c in whole["choices"]}
    assert whole["usage"]["completion_tokens"] == 2 * 6


def test_one_beam_is_greedy(server: Server) -> None:
    beam = post(server, use_beam_search=True).json()["choices"][0]["text"]
    assert beam == post(server, temperature=0).json()["choices"][0]["text"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 17}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True, "best_of": 2, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "best_of": 2, "temperature": 0.7}, "temperature"),
        ({"length_penalty": 2.0}, "length_penalty"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(server: Server, fields: dict[str, object], param: str) -> None:
    answer = post(server, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
