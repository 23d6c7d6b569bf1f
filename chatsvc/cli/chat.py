"""``chatsvc chat``: a conversation in the terminal, against a server.

Ctrl-C stops the answer (the server stops computing it, too), Ctrl-D leaves. With piped input every line is a message,
and nothing but the answers goes to the output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import click
import httpx

from chatsvc.errors import ChatsvcError, ConfigError
from chatsvc.modelfiles import DEFAULT_MODEL

with suppress(ImportError):  # not on every system
    import readline  # noqa: F401  line editing and history for input()

# Connecting fails fast; between two tokens a busy server may be silent for long (it sends comments meanwhile).
_TIMEOUT = httpx.Timeout(10.0, read=120.0)
HELP = """/new   forget the conversation and begin another
/exit  leave (as Ctrl-D)
/help  this
Everything else is said to the model. Ctrl-C stops its answer."""
_URL_MARK = "Chat page:"


class ChatError(ChatsvcError):
    """The server cannot be reached, refused, or broke off; the message is one line for the terminal."""


@click.command("chat")
@click.option(
    "--url",
    envvar="CHATSVC_URL",
    help="a running server [CHATSVC_HOST and CHATSVC_PORT, or 127.0.0.1:8000]",
)
@click.option("--in-process", "own", is_flag=True, envvar="CHATSVC_IN_PROCESS", help="load the model here, no server")
@click.option("--model", envvar="CHATSVC_MODEL", help="model to ask for [the server's]; with --in-process: to load")
@click.option("--system", envvar="CHATSVC_SYSTEM", help="system prompt")
@click.option("--temperature", type=float, default=0.2, envvar="CHATSVC_TEMPERATURE", show_default=True)
@click.option(
    "--max-tokens", type=int, default=None, envvar="CHATSVC_MAX_TOKENS", help="longest answer [the room left]"
)
@click.option("--api-key", envvar="CHATSVC_API_KEY", help="key, if the server wants one")
def command(
    url: str | None,
    own: bool,
    model: str | None,
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    api_key: str | None,
) -> None:
    """Chat in the terminal. Ctrl-C stops the answer, Ctrl-D leaves."""
    fields: dict[str, Any] = {"temperature": temperature}
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if not own:
        asked = url or default_url(os.environ)
        sys.exit(run_chat(asked, model, system, api_key, fields=fields, quiet=not sys.stdin.isatty()))
    if url is not None:
        raise ConfigError("--url and --in-process exclude each other")
    with own_server(model or DEFAULT_MODEL) as started:
        sys.exit(run_chat(started, None, system, None, fields=fields, quiet=not sys.stdin.isatty()))


def default_url(environ: Mapping[str, str]) -> str:
    """The server that ``chatsvc serve`` starts with the same variables."""
    host = environ.get("CHATSVC_HOST") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # listening everywhere is no address to call
    return f"http://{f'[{host}]' if ':' in host else host}:{environ.get('CHATSVC_PORT') or 8000}"


def base_of(url: str) -> str:
    """``127.0.0.1:8231``, ``http://host/`` and ``http://host/v1`` are the same server, ``http://.../v1``."""
    if "://" not in url:
        url = f"http://{url}"
    return url.rstrip("/").removesuffix("/v1") + "/v1"


@contextmanager
def own_server(model: str) -> Iterator[str]:
    """A server of our own on a free local port, which ends with us; yields its URL.

    Raises: ConfigError with its last words when it does not start.
    """
    program = "from chatsvc.cli.main import main; main()"
    flags = ["serve", "--model", model, "--host", "127.0.0.1", "--port", "0", "--session-store", "memory://"]
    flags += ["--api-key-file", ""]  # it is ours alone, whatever the variables say
    # A terminated parent must still end its child.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryFile("w+") as log:
        # A session of its own, so that Ctrl-C reaches us alone.
        child = subprocess.Popen(
            [sys.executable, "-c", program, *flags],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if _URL_MARK in line:
                    yield line.split(_URL_MARK, 1)[1].strip()
                    return
            log.seek(0)
            lines = log.read().strip().splitlines() or ["it ended without a word"]
            raise ConfigError(f"the model could not be loaded: {lines[-1].removeprefix('chatsvc: ')}")
        finally:
            child.terminate()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
            signal.signal(signal.SIGTERM, before)


def run_chat(
    url: str,
    model: str | None,
    system: str | None,
    api_key: str | None,
    *,
    fields: Mapping[str, Any] | None = None,
    read: Callable[[str], str] = input,
    client: httpx.Client | None = None,
    quiet: bool = False,
) -> int:
    """Talk until the end of the input; returns the exit status (1: the server could not be used at all).

    Args:
        url: of the server, with or without ``http://`` and ``/v1``.
        model: as the server names it; None: the first that it lists.
        fields: further fields of each request, such as temperature.
        read: asks for one line; EOFError ends the conversation.
        quiet: the input is no terminal: no greeting, no prompts, and status 1 as well when an answer failed.
    """
    base = base_of(url)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with client or httpx.Client(timeout=_TIMEOUT, trust_env=False) as http:
        http.headers.update(headers)
        try:
            name = model or _first_model(http, base)
        except ChatError as error:
            print(f"chatsvc: {error}", file=sys.stderr)
            return 1
        if not quiet:
            print(f"{name} at {base.removesuffix('/v1')} - Ctrl-C stops an answer, Ctrl-D leaves, /help")
        begin: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        messages = list(begin)
        failed = False
        while True:
            try:
                line = read("" if quiet else "\n> ")
            except EOFError:
                if not quiet:
                    print()
                return 1 if failed and quiet else 0
            except KeyboardInterrupt:
                print()
                if quiet:
                    return 130
                continue
            word = line.strip()
            if word in ("/exit", "/quit"):
                return 1 if failed and quiet else 0
            if word == "/new":
                messages = list(begin)
            elif word == "/help":
                print(HELP)
            elif word.startswith("/") and word[1:].isalpha():
                print(f"There is no command {printable(word)}; /help lists them", file=sys.stderr)
            elif word:
                request = {**(fields or {}), "model": name, "stream": True}
                failed |= not _turn(http, base, request, messages, line)


def _turn(http: httpx.Client, base: str, request: dict[str, Any], messages: list[dict[str, str]], line: str) -> bool:
    """One question and its answer; both stay in ``messages`` unless the answer failed before it began.

    Returns whether nothing failed.
    """
    whole = True
    messages.append({"role": "user", "content": line})
    answer: list[str] = []
    try:
        for text in _stream(http, base, {**request, "messages": messages}):
            answer.append(text)
            print(printable(text), end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    except ChatError as error:
        print("\n" if answer else "", end="")
        print(f"chatsvc: {error}", file=sys.stderr)
        whole = False
        if not answer:
            messages.pop()
            return whole
    # An empty answer (stopped before the first word) stays, too: roles must alternate.
    messages.append({"role": "assistant", "content": "".join(answer)})
    return whole


def _stream(http: httpx.Client, base: str, body: dict[str, Any]) -> Iterator[str]:
    """Pieces of the answer. Leaving the iterator closes the connection, which makes the server stop."""
    try:
        with http.stream("POST", f"{base}/chat/completions", json=body) as response:
            if response.status_code != 200:
                response.read()
                raise ChatError(_refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise ChatError(str(event["error"].get("message", event["error"])))
                for choice in event.get("choices") or []:
                    text = (choice.get("delta") or {}).get("content")
                    if text:
                        yield text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatError(_trouble(base, error)) from error
    except ValueError as error:
        raise ChatError(f"{base} sent something that is not JSON") from error
    raise ChatError("the server closed the connection before the answer was complete")


def _first_model(http: httpx.Client, base: str) -> str:
    try:
        response = http.get(f"{base}/models")
        if response.status_code != 200:
            raise ChatError(_refusal(response))
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ChatError(_trouble(base, error)) from error
    except (ValueError, LookupError, TypeError) as error:
        raise ChatError(f"{base} does not answer like an OpenAI-compatible server") from error


def _trouble(base: str, error: Exception) -> str:
    if isinstance(error, httpx.ConnectError):
        return f"cannot reach {base}: {error} (is the server running? start it with: chatsvc serve)"
    if isinstance(error, httpx.TimeoutException):
        return f"{base} did not answer in time"
    return f"the connection to {base} broke: {error or type(error).__name__}"


def _refusal(response: httpx.Response) -> str:
    try:
        message = str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = response.reason_phrase
    wait = response.headers.get("retry-after")
    return f"{message} (HTTP {response.status_code}{f', try again in {wait} s' if wait else ''})"


def printable(text: str) -> str:
    """Without control characters: a model's text must not steer the terminal."""
    return "".join(char for char in text if char in "\n\t" or (char >= " " and not "\x7f" <= char <= "\x9f"))
