"""An answer as OpenAI's Responses show it: output items, and the typed events in which they come.

Both are made by one :class:`OutputWriter`, token by token, so that they are a function of the log alone: a reader that
comes back finds the events it knows under the numbers it knows, and the whole answer is what its events say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from chatsvc.api.frames import dumps
from chatsvc.api.tools import CallReading
from chatsvc.engine.output import FAILED, FinishReason
from chatsvc.text.toolparser import CallBegin, CallEnd, Piece, Text, ToolCallParser

Event = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]

INTERRUPTED = "The server stopped before the answer was complete"


def event_frame(event: Event) -> bytes:
    """One server-sent event, with its type as its name, as OpenAI sends it."""
    return f"event: {event['type']}\ndata: {dumps(event)}\n\n".encode()


class OutputWriter:
    """Pieces of text in, events out; ``output`` are the items so far.

    Args:
        hexid: makes the ids of the items; the same one makes the same ids.
        calls: how function calls are read; None: all is text.
    """

    def __init__(self, hexid: str, calls: CallReading | None) -> None:
        self._hexid = hexid
        self._parser: ToolCallParser | None = None
        if calls is not None:
            self._parser = calls.parser(eager=True, new_id=self._call_id)
        self.output: list[dict[str, Any]] = []
        self._open = False
        self._called = 0

    def text(self, piece: str) -> Iterator[Event]:
        """What a token has released."""
        if piece:
            yield from self._pieces([Text(piece)] if self._parser is None else self._parser.push(piece))

    def end(self, *, complete: bool) -> Iterator[Event]:
        """The end of the answer. ``complete``: it was not cut off."""
        if self._parser is not None:
            yield from self._pieces(self._parser.flush())
        if not self.output:
            yield from self._open_message()
        yield from self._close("completed" if complete else "incomplete")

    def _pieces(self, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if isinstance(piece, Text):
                if not self._open or self.output[-1]["type"] != "message":
                    yield from self._close("completed")
                    yield from self._open_message()
                self.output[-1]["content"][0]["text"] += piece.text
                yield self._event("output_text.delta", content_index=0, delta=piece.text, logprobs=[])
            elif isinstance(piece, CallBegin):
                yield from self._close("completed")
                item = {
                    "id": f"fc_{self._hexid}_{len(self.output)}",
                    "type": "function_call",
                    "status": "in_progress",
                    "call_id": piece.id,
                    "name": piece.name,
                    "arguments": "",
                }
                yield from self._begin(item)
            elif isinstance(piece, CallEnd):
                yield from self._close("completed" if piece.complete else "incomplete")
            else:
                self.output[-1]["arguments"] += piece.text
                yield self._event("function_call_arguments.delta", delta=piece.text)

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        self.output.append(item)
        self._open = True
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _open_message(self) -> Iterator[Event]:
        item = {
            "id": f"msg_{self._hexid}_{len(self.output)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        yield from self._begin(item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output[-1]["content"].append(part)
        yield self._event("content_part.added", content_index=0, part=dict(part))

    def _close(self, status: Literal["completed", "incomplete"]) -> Iterator[Event]:
        """The item that is being written, if there is one, is done."""
        if not self._open:
            return
        self._open = False
        item = self.output[-1]
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            yield self._event("output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._event("content_part.done", content_index=0, part=dict(part))
        else:
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": _copy(item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        at = len(self.output) - 1
        return {"type": f"response.{kind}", "item_id": self.output[at]["id"], "output_index": at, **fields}

    def _call_id(self) -> str:
        self._called += 1
        return f"call_{self._hexid[:20]}{self._called:04x}"


def whole_output(
    hexid: str, calls: CallReading | None, pieces: Sequence[str], *, complete: bool | None
) -> list[dict[str, Any]]:
    """The items of an answer. ``complete``: None while it runs."""
    writer = OutputWriter(hexid, calls)
    for piece in pieces:
        for _ in writer.text(piece):
            pass
    if complete is not None:
        for _ in writer.end(complete=complete):
            pass
    return writer.output


def response_usage(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    """Chat's usage in the words of Responses."""
    if usage is None:
        return None
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        "timings": usage.get("timings"),
    }


def finished_fields(finish: FinishReason | None, *, interrupted: bool = False, error: str | None = None) -> Event:
    """``status``, ``error`` and ``incomplete_details`` of an answer that ended like this (None: it runs)."""
    status: Status = "in_progress"
    why: dict[str, Any] | None = None
    incomplete: dict[str, Any] | None = None
    if finish == "error" or interrupted:
        status, why = "failed", {"code": "server_error", "message": error or (INTERRUPTED if interrupted else FAILED)}
    elif finish == "stop":
        status = "completed"
    elif finish == "length":
        status, incomplete = "incomplete", {"reason": "max_output_tokens"}
    elif finish == "abort":
        status = "cancelled"
    return {"status": status, "error": why, "incomplete_details": incomplete}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: it goes on growing."""
    return {**item, "content": [dict(p) for p in item["content"]]} if "content" in item else dict(item)
