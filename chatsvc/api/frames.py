"""The wire shapes of answers: events of a stream, and whole bodies.

Events are put together from a prebuilt head and small pieces: this runs once per token and stream. One ``data:`` line
per event, LF line ends. Characters that some line readers take for a line end (U+0085, U+2028, U+2029) are escaped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from chatsvc.api.errors import describe, error_body
from chatsvc.api.logprobs import CompletionLogprobs, TokenNames, chat_content
from chatsvc.api.timings import timings
from chatsvc.api.tools import CallReading
from chatsvc.engine.output import Delta, FinishReason, Generation, OutputLog
from chatsvc.scheduler.plan import SampledToken
from chatsvc.text.toolparser import CallArguments, CallBegin, CallEnd, Text, ToolCallParser

SLICE = 64
DONE = b"data: [DONE]\n\n"

# "abort" is no reason OpenAI's clients know; the choice says it was cancelled in a field of its own.
FINISH: dict[FinishReason, Literal["stop", "length"]] = {"stop": "stop", "length": "length", "abort": "stop"}

_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def dumps(value: Any) -> str:
    """Compact JSON, never NaN, no character in it that could be taken for a line end."""
    text = _JSON.encode(value)
    return text if text.isascii() else text.translate(_LINE_ENDS)


def dumps_in_slices(value: Any) -> str:
    """As :func:`dumps`, for large values in a thread: long lists are encoded in slices.

    The C encoder does not let go of the interpreter before it is done; between two slices the event loop runs.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{dumps(k)}:{dumps_in_slices(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list) and len(value) > SLICE:
        return "[" + ",".join(dumps(value[i : i + SLICE])[1:-1] for i in range(0, len(value), SLICE)) + "]"
    if isinstance(value, list):
        return "[" + ",".join(map(dumps_in_slices, value)) + "]"
    return dumps(value)


def event(value: Any) -> bytes:
    """One event."""
    return f"data: {dumps(value)}\n\n".encode()


def error_event(message: str, code: str = "engine_error") -> bytes:
    """The event that ends a stream which went wrong. OpenAI's clients raise APIError on a ``data`` with ``error``."""
    return b"event: error\n" + event(error_body(message, "server_error", None, code))


def exception_event(exc: Exception) -> bytes:
    """As :func:`error_event`, from the exception; what is not ours says nothing about the inside."""
    return b"event: error\n" + event(describe(exc)[2])


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """OpenAI's usage object: every generated token counts, the end token too; a prompt counts once for all choices.

    ``timings`` is ours.
    """
    prompt = sum(len(g.prompt_token_ids) for g in generations)
    completion = sum(g.num_output_tokens for g in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(g.num_cached_tokens for g in generations)},
        "timings": timings(generations),
    }


class Shape(Protocol):
    """How a kind of answer looks on the wire."""

    def chunk(self, index: int, delta: Delta, log: OutputLog) -> bytes:
        """The events of what is new in a choice; empty when nothing can be said yet."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> bytes: ...

    @property
    def work(self) -> int:
        """What a token costs in :meth:`body`, in bytes of plain text."""
        ...

    def body(self, logs: Sequence[OutputLog], usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer; ``logs`` in the order of their index."""
        ...


def silent_end(
    log: OutputLog, tokens: tuple[SampledToken, ...], finish: FinishReason | None, eos: frozenset[int]
) -> int | None:
    """Index of the last of ``tokens`` when it ended the choice and is no text (end token or stop token id)."""
    if finish != "stop" or not tokens or isinstance(log.stop_reason, str):
        return None
    last = tokens[-1].token_id
    return len(tokens) - 1 if last in eos or log.stop_reason == last else None


class _Answered:
    """What both shapes know of the answer.

    Args:
        logprobs: None, or the number of alternatives to report.
        usage_in_stream: chunks carry ``"usage": null`` and the last one the usage.
        calls: how tool calls are read (chat only); None: no tools, all is text.
    """

    def __init__(
        self,
        completion_id: str,
        model: str,
        names: TokenNames,
        eos: frozenset[int],
        *,
        logprobs: int | None = None,
        usage_in_stream: bool = False,
        calls: CallReading | None = None,
    ) -> None:
        self.id = completion_id
        self.model = model
        self.created = int(time.time())
        self._names = names
        self._eos = eos
        self._logprobs = logprobs
        self._usage_in_stream = usage_in_stream
        self._calls = calls
        self._prepare()

    @property
    def work(self) -> int:
        """See :class:`Shape`."""
        return 4 if self._logprobs is None and self._calls is None else 100

    def _prepare(self) -> None:
        """What a shape keeps besides."""


class ChatShape(_Answered):
    """chat.completion and chat.completion.chunk."""

    def _prepare(self) -> None:
        head = dumps({"id": self.id, "object": "chat.completion.chunk", "created": self.created, "model": self.model})[
            :-1
        ]
        self._head = f'data: {head},"choices":['
        self._tail = '],"usage":null}\n\n' if self._usage_in_stream else "]}\n\n"
        self._begun: set[int] = set()
        self._parsers: dict[int, ToolCallParser] = {}

    def chunk(self, index: int, delta: Delta, log: OutputLog) -> bytes:
        """See :class:`Shape`. The role comes just before the first news of a choice, not before work was done."""
        if delta.finish_reason is None and self._logprobs is None and self._calls is None and index in self._begun:
            if not delta.text:
                return b""
            plain = (
                f'{{"index":{index},"delta":{{"content":{dumps(delta.text)}}},"logprobs":null,"finish_reason":null}}'
            )
            return (self._head + plain + self._tail).encode()  # the usual one
        news, called = self._news(index, delta)
        logprobs = "null"
        if self._logprobs is not None and delta.tokens:
            logprobs = dumps({"content": self._content(log, delta.tokens, delta.finish_reason), "refusal": None})
            if not news or not news[0].startswith('{"content"'):
                news.insert(0, '{"content":""}')
        elif not news and delta.finish_reason is None:
            return b""  # held back: part of a character, or perhaps the start of a stop string or a call
        parts = []
        if index not in self._begun:
            self._begun.add(index)
            parts.append(self._choice(index, '{"role":"assistant","content":""}'))
        for item in news:
            parts.append(self._choice(index, item, logprobs))
            logprobs = "null"
        if delta.finish_reason is not None:
            parts.append(self._choice(index, "{}", finish=delta.finish_reason, called=called))
        return "".join(parts).encode()

    def _news(self, index: int, delta: Delta) -> tuple[list[str], bool]:
        """The JSON deltas of a choice's new text, and whether the choice has called a tool so far."""
        if self._calls is None:
            return ([f'{{"content":{dumps(delta.text)}}}'] if delta.text else []), False
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._calls.parser(eager=True)
        pieces = parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.flush()
        return [_piece(piece) for piece in pieces if not isinstance(piece, CallEnd)], parser.complete > 0

    def _choice(
        self, index: int, delta: str, logprobs: str = "null", finish: FinishReason | None = None, called: bool = False
    ) -> str:
        end = "null" if finish is None else f'"{_finish(finish, called)}"'
        if finish == "abort":
            end += ',"cancelled":true'
        choice = f'{{"index":{index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{end}}}'
        return self._head + choice + self._tail

    def _content(
        self, log: OutputLog, tokens: tuple[SampledToken, ...], finish: FinishReason | None
    ) -> list[dict[str, Any]]:
        return chat_content(tokens, self._logprobs or 0, self._names, silent_end(log, tokens, finish, self._eos))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """See :class:`Shape`."""
        return f'{self._head}],"usage":{dumps(usage)}}}\n\n'.encode()

    def body(self, logs: Sequence[OutputLog], usage: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Shape`."""
        choices = []
        for index, log in enumerate(logs):
            message = answer_message(log.text, self._calls)
            choice: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": None,
                "finish_reason": _finish(log.finish_reason or "abort", "tool_calls" in message),
            }
            if log.finish_reason == "abort":
                choice["cancelled"] = True
            if self._logprobs is not None:
                choice["logprobs"] = {
                    "content": self._content(log, tuple(log.tokens), log.finish_reason),
                    "refusal": None,
                }
            choices.append(choice)
        return {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }


def answer_message(text: str, calls: CallReading | None) -> dict[str, Any]:
    """An assistant's message; ``content`` is null when there is nothing but calls."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls is None:
        return message
    parser = calls.parser(eager=False)
    made: list[dict[str, Any]] = []
    content = ""
    for piece in [*parser.push(text), *parser.flush()]:
        if isinstance(piece, Text):
            content += piece.text
        elif isinstance(piece, CallBegin):
            made.append({"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}})
        elif isinstance(piece, CallArguments):
            made[piece.index]["function"]["arguments"] += piece.text
    message["content"] = content or (None if made else "")
    if made:
        message["tool_calls"] = made
    return message


def _piece(piece: Text | CallBegin | CallArguments) -> str:
    """A piece of an answer as the delta of a chunk."""
    if isinstance(piece, Text):
        return f'{{"content":{dumps(piece.text)}}}'
    call: dict[str, Any] = {"index": piece.index}
    if isinstance(piece, CallBegin):
        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": ""}}
    else:
        call["function"] = {"arguments": piece.text}
    return dumps({"tool_calls": [call]})


def _finish(reason: FinishReason, called: bool) -> str:
    return "tool_calls" if called and reason == "stop" else FINISH[reason]


class CompletionShape(_Answered):
    """text_completion, streamed and whole."""

    def _prepare(self) -> None:
        self._offsets: dict[int, CompletionLogprobs] = {}

    def _base(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _choice(
        self, index: int, text: str, tokens: tuple[SampledToken, ...], log: OutputLog, finish: FinishReason | None
    ) -> dict[str, Any]:
        logprobs = None
        if self._logprobs is not None and tokens:
            offsets = self._offsets.get(index)
            if offsets is None:
                offsets = self._offsets[index] = CompletionLogprobs(self._logprobs, self._names)
            logprobs = offsets.add(tokens, silent_end(log, tokens, finish, self._eos))
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": None if finish is None else FINISH[finish],
        }
        if finish == "abort":
            choice["cancelled"] = True
        return choice

    def chunk(self, index: int, delta: Delta, log: OutputLog) -> bytes:
        """See :class:`Shape`."""
        if not delta.text and delta.finish_reason is None and self._logprobs is None:
            return b""
        value = self._base()
        value["choices"] = [self._choice(index, delta.text, delta.tokens, log, delta.finish_reason)]
        if self._usage_in_stream:
            value["usage"] = None
        return event(value)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """See :class:`Shape`."""
        return event({**self._base(), "choices": [], "usage": usage})

    def body(self, logs: Sequence[OutputLog], usage: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Shape`."""
        choices = [
            self._choice(i, log.text, tuple(log.tokens), log, log.finish_reason or "abort")
            for i, log in enumerate(logs)
        ]
        return {**self._base(), "choices": choices, "usage": usage}
