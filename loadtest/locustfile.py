"""Load test with Locust: users who hold conversations and read the answers as they stream.

    make loadtest                                    # 8 users, 60 s, report in loadtest/report/report.html
    locust -f loadtest/locustfile.py --headless -u 8 -r 4 -t 60s --html report.html      # the same by hand
    locust -f loadtest/locustfile.py                                                     # with Locust's own page

The target is http://127.0.0.1:8000 unless ``--host`` says otherwise; only ever point it at a server of your own. The
variable ``CHATSVC_API_KEY`` has the key of a server that wants one.
Beside Locust's own line for each request (its time is that of the whole answer) there are, under the type ``stream``:

``TTFT``
    milliseconds from just before the request is sent to the first text. A chunk with only the role is no text.
``inter-token``
    of one answer: milliseconds per token after its first piece of text. Tokens are counted by the server's usage and
    not by chunks, since a chunk may hold several.
``silence``
    of one answer: the longest wait between two pieces of text, in milliseconds.

A failed request counts as failed and has no time, so refusals do not make the percentiles look fast: an HTTP error, an
error event in the middle, a stream that ends without ``[DONE]`` or without a finish reason.

HttpUser, not FastHttpUser: the latter's line reader waits for a full buffer and sees the first tokens late.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from argparse import ArgumentParser
from dataclasses import dataclass, field
from typing import Any

import gevent
from locust import HttpUser, between, events, task
from locust.env import Environment

PATH = "/v1/chat/completions"
OPENINGS = (
    "Tell me something about the history of bread.",
    "How do I keep houseplants alive in winter?",
    "Explain recursion with an everyday example.",
    "Write four lines about the sea.",
    "What is the difference between weather and climate?",
    "Plan a quiet Sunday for me.",
)
FOLLOW_UPS = (
    "Can you say that more simply?",
    "Give me an example.",
    "Why is that?",
    "And what would be the opposite?",
    "Go on, please.",
)
SYSTEM = "You are a careful assistant of a small library. " * 12
LONGEST_PAUSE = 10.0  # seconds that a Retry-After is obeyed for


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """Options beside Locust's own."""
    parser.add_argument("--max-tokens", type=int, default=96, help="longest answer")
    parser.add_argument("--turns", type=int, default=4, help="turns of a conversation before a new one begins")


@dataclass
class Totals:
    """Tokens over the whole run, by the server's own count."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    began: float = field(default_factory=time.monotonic)


@events.test_start.add_listener
def reset_totals(environment: Environment, **_: Any) -> None:
    """Each run counts for itself."""
    environment.totals = Totals()  # type: ignore[attr-defined]


@events.test_stop.add_listener
def say_totals(environment: Environment, **_: Any) -> None:
    """One line that Locust has no column for."""
    totals: Totals = environment.totals  # type: ignore[attr-defined]
    seconds = time.monotonic() - totals.began
    share = totals.cached / totals.prompt if totals.prompt else 0.0
    print(
        f"tokens: {totals.generated} generated ({totals.generated / seconds:.1f}/s), "
        f"{totals.prompt} prompt tokens, {share:.0%} of them cached"
    )


class BrokenStream(Exception):
    """An answer that did not come to its proper end."""


@dataclass
class Answer:
    """What one stream held."""

    text: str = ""
    times: list[float] = field(default_factory=list)  # when each piece of text came, monotonic seconds
    usage: dict[str, Any] | None = None
    finish: str | None = None
    done: bool = False

    def take(self, line: bytes) -> None:
        """One line of the stream. Raises: BrokenStream on an error event."""
        if not line.startswith(b"data:"):
            return  # a comment, an event name, an id
        data = line[5:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if chunk.get("error"):
            raise BrokenStream(f"error event: {chunk['error'].get('message')}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices") or ():
            piece = (choice.get("delta") or {}).get("content")
            if piece:
                self.times.append(time.monotonic())
                self.text += piece
            self.finish = choice.get("finish_reason") or self.finish

    def check(self) -> None:
        """Raises: BrokenStream when the stream was cut."""
        if not self.done:
            raise BrokenStream("truncated: no [DONE]")
        if self.finish is None:
            raise BrokenStream("truncated: no finish reason")


class ChatUser(HttpUser):
    """Asks, reads to the end, thinks a little, asks on; after some turns begins a new conversation."""

    host = "http://127.0.0.1:8000"
    wait_time = between(0.2, 1.5)

    def on_start(self) -> None:
        """Find out what the server serves."""
        if key := os.environ.get("CHATSVC_API_KEY"):
            self.client.headers["Authorization"] = f"Bearer {key}"
        with self.client.get("/v1/models", catch_response=True) as response:
            models = response.json()["data"] if response.ok else []
            if not models:
                response.failure("no model is served")
        self.model = models[0]["id"] if models else "unknown"
        self.begin()

    def begin(self) -> None:
        """A new conversation. Everybody's has the same system prompt, which a server may compute once."""
        self.messages: list[dict[str, str]] = [{"role": "system", "content": SYSTEM}]
        self.left = self.environment.parsed_options.turns

    @task
    def turn(self) -> None:
        """One question and its answer."""
        if self.left == 0:
            self.begin()
        question = random.choice(OPENINGS if len(self.messages) == 1 else FOLLOW_UPS)
        messages = [*self.messages, {"role": "user", "content": question}]
        answer = self.ask(messages)
        if answer is None:
            self.begin()
            return
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.left -= 1

    def ask(self, messages: list[dict[str, str]]) -> Answer | None:
        """Stream one answer and report on it; None when it failed."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.environment.parsed_options.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = Answer()
        began = time.monotonic()
        with self.client.post(PATH, json=body, stream=True, catch_response=True) as response:
            meta = response.request_meta
            try:
                if response.status_code != 200:
                    raise BrokenStream(f"HTTP {response.status_code}")
                for line in response.iter_lines():
                    answer.take(line)
                answer.check()
            except Exception as error:  # whatever it was: failed, and without a time
                meta["response_time"] = None
                response.failure(error if isinstance(error, BrokenStream) else BrokenStream(f"broken: {error}"))
                retry_after = response.headers.get("Retry-After", "") if response.headers else ""
                gevent.sleep(min(float(retry_after), LONGEST_PAUSE) if retry_after.isdecimal() else 0)
                return None
            meta["response_time"] = (time.monotonic() - began) * 1000
            meta["response_length"] = len(answer.text)
            response.success()
        self.report(answer, began)
        return answer

    def report(self, answer: Answer, began: float) -> None:
        """The events of a whole answer."""
        usage = answer.usage or {}
        totals: Totals = self.environment.totals  # type: ignore[attr-defined]
        totals.prompt += usage.get("prompt_tokens", 0)
        totals.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        tokens = usage.get("completion_tokens", 0)
        totals.generated += tokens
        times = answer.times
        if not times:
            return  # an empty answer has no first token
        self.fire("TTFT", times[0] - began)
        pieces = len(times)
        if pieces > 1 and tokens > 1:
            # The first piece's tokens came before the clock of this one began; pieces are about equally long.
            self.fire("inter-token", (times[-1] - times[0]) / (tokens * (pieces - 1) / pieces))
            self.fire("silence", max(b - a for a, b in itertools.pairwise(times)))

    def fire(self, name: str, seconds: float) -> None:
        """One event of the type ``stream``."""
        self.environment.events.request.fire(
            request_type="stream",
            name=name,
            response_time=seconds * 1000,
            response_length=0,
            exception=None,
            context={},
        )
