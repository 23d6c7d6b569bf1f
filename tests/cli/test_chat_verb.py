"""The terminal chat against a scripted server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from chatsvc.cli.chat import base_of, command, default_url, own_server, printable, run_chat
from chatsvc.errors import ConfigError


class Script(httpx.SyncByteStream):
    """Bytes of an answer; an exception in the list is raised where it stands."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts, self.closed = parts, False

    def __iter__(self) -> Iterator[bytes]:
        for part in self.parts:
            if isinstance(part, BaseException):
                raise part
            yield part

    def close(self) -> None:
        self.closed = True


def delta(text: str) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


class Server:
    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.asked, self.headers = answers, [], httpx.Headers()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers = request.headers
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "tiny"}]})
        assert request.url.path == "/v1/chat/completions"
        self.asked.append(json.loads(request.content))
        answer = self.answers.pop(0)
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, stream=answer)


def talk(handler: Callable[[httpx.Request], httpx.Response], lines: list[Any], **options: Any) -> int:
    feed = iter(lines)

    def read(_: str) -> str:
        line = next(feed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    client = httpx.Client(transport=httpx.MockTransport(handler))
    given: dict[str, Any] = {"model": None, "system": None, "api_key": None, **options}
    quiet = options.get("quiet", False)
    ask = (given["model"], given["system"], given["api_key"])
    return run_chat("http://server:1/", *ask, read=read, client=client, quiet=quiet)


def test_conversation_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    first = Script([b": ping\n\n", delta("Hel"), delta("lo"), b'data: {"choices": [], "usage": {}}\n\n', DONE])
    server = Server([first, Script([delta("é")[:-30], delta("é")[-30:], DONE])])
    assert talk(server, ["hi", "  ", "more"], system="be kind", api_key="secret") == 0
    out = capsys.readouterr().out
    assert "tiny at http://server:1" in out and "Hello\n" in out and "é\n" in out
    assert server.headers["authorization"] == "Bearer secret"
    assert server.asked[1] == {
        "model": "tiny",
        "stream": True,
        "messages": [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "more"},
        ],
    }


def test_in_process_loads_a_model_and_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHATSVC_API_KEY_FILE", "/nowhere/keys.toml")  # of another server
    with own_server("smollm2-135m") as url:
        client = httpx.Client(trust_env=False)
        feed = iter(["Say hi."])
        assert run_chat(url, None, None, None, fields={"max_tokens": 3}, read=lambda _: _next(feed), client=client) == 0
    with pytest.raises(ConfigError, match="no file or directory nonsense"), own_server("nonsense"):
        pass


def _next(feed: Iterator[str]) -> str:
    for line in feed:
        return line
    raise EOFError


def test_ctrl_c_stops_only_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    cut = Script([delta("Hel"), KeyboardInterrupt()])
    server = Server([cut, Script([delta("ok"), DONE])])
    assert talk(server, [KeyboardInterrupt(), "hi", "again"], model="m") == 0
    assert cut.closed, "the server must hear that nobody listens any more"
    assert "Hel [stopped]" in capsys.readouterr().out
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "Hel"}


@pytest.mark.parametrize(
    ("answer", "message", "kept"),
    [
        (httpx.Response(429, json={"error": {"message": "queue full"}}, headers={"Retry-After": "3"}), "queue full", 1),
        (httpx.Response(502, text="<html>"), "HTTP 502", 1),
        (Script([delta("Hel"), b'event: error\ndata: {"error": {"message": "engine broke"}}\n\n']), "engine broke", 3),
        (Script([delta("Hel")]), "before the answer was complete", 3),
        (Script([delta("Hel"), httpx.ReadError("reset")]), "broke", 3),
        (Script([b"data: {\n\n"]), "not JSON", 1),
    ],
)
def test_errors_are_one_line_and_the_chat_goes_on(
    answer: Any, message: str, kept: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server([answer, Script([DONE])])
    assert talk(server, ["hi", "again"]) == 0
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert len(server.asked[1]["messages"]) == kept


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert talk(refuse, ["hi"]) == 1
    assert "cannot reach http://server:1/v1" in capsys.readouterr().err
    assert talk(lambda _: httpx.Response(200, text="hello"), ["hi"]) == 1
    assert talk(lambda _: httpx.Response(401, json={"error": {"message": "no key"}}), ["hi"]) == 1
    assert "no key" in capsys.readouterr().err


def test_a_model_cannot_steer_the_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\x9bc\n\té") == "a[2Jbc\n\té"


def test_piped_input_gives_answers_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    prompts: list[str] = []
    server = Server([Script([delta("one"), DONE]), Script([delta("two"), DONE])])
    feed = iter(["hi", "more"])

    def read(prompt: str) -> str:
        prompts.append(prompt)
        return _next(feed)

    client = httpx.Client(transport=httpx.MockTransport(server))
    assert run_chat("server:1", None, None, None, read=read, client=client, quiet=True) == 0
    assert capsys.readouterr().out == "one\ntwo\n" and set(prompts) == {""}
    assert talk(Server([httpx.Response(502, text="x")]), ["hi"], quiet=True) == 1


def test_a_pipe_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr("chatsvc.cli.chat.run_chat", lambda url, *_, **kw: seen.update(kw, url=url) or 0)
    env = {"CHATSVC_HOST": "0.0.0.0", "CHATSVC_PORT": "8231"}
    assert CliRunner().invoke(command, [], input="hi\n", env=env).exit_code == 0
    assert seen["quiet"] is True and seen["url"] == "http://127.0.0.1:8231"


@pytest.mark.parametrize(
    ("environ", "url"),
    [
        ({}, "http://127.0.0.1:8000"),
        ({"CHATSVC_PORT": "8123"}, "http://127.0.0.1:8123"),
        ({"CHATSVC_HOST": "10.0.0.2", "CHATSVC_PORT": ""}, "http://10.0.0.2:8000"),
        ({"CHATSVC_HOST": "::", "CHATSVC_PORT": "1"}, "http://[::1]:1"),
    ],
)
def test_the_default_server_is_the_one_of_the_same_variables(environ: dict[str, str], url: str) -> None:
    assert default_url(environ) == url


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8231", "http://127.0.0.1:8231/", "127.0.0.1:8231/v1", "http://127.0.0.1:8231/v1/"]
)
def test_a_url_with_and_without_its_frills(url: str) -> None:
    assert base_of(url) == "http://127.0.0.1:8231/v1"


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    server = Server([Script([delta("one"), DONE]), Script([delta("two"), DONE])])
    assert talk(server, ["/help", "hi", "/new", "/nonsense", "/etc/hosts?", "/exit", "never"], system="S") == 0
    captured = capsys.readouterr()
    assert "/new" in captured.out and "no command /nonsense" in captured.err
    assert [[m["content"] for m in asked["messages"]] for asked in server.asked] == [["S", "hi"], ["S", "/etc/hosts?"]]
