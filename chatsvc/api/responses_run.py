"""A response that is being made, and its events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from chatsvc.api.frames import usage
from chatsvc.api.middleware import RequestInfo
from chatsvc.api.responses_object import Settings
from chatsvc.api.responses_output import Event, OutputWriter, event_frame, finished_fields
from chatsvc.api.sse import closing
from chatsvc.api.turn import Turn
from chatsvc.engine.output import Generation
from chatsvc.engine.wake import Pace
from chatsvc.errors import StoreError


@dataclass(frozen=True, slots=True)
class Run:
    """``info``: of the request that looks at it. ``turn``: None when the response is not stored."""

    settings: Settings
    generation: Generation
    info: RequestInfo
    turn: Turn | None = None

    def now(self) -> dict[str, Any]:
        """The response as it is now."""
        log = self.generation.logs[0]
        output = self.settings.output([*log.pieces, log.tail], log.finish_reason)
        counts = None if log.finish_reason is None else usage([self.generation])
        return self.settings.response(output, finished_fields(log.finish_reason, error=log.error), counts)


async def run_events(
    run: Run, after: int, stored: Callable[[Run], Awaitable[None]], pace: Pace
) -> AsyncIterator[bytes]:
    """The events whose ``sequence_number`` is above ``after``, to the end.

    Args:
        stored: waits until the end is in the store. Raises StoreError when that takes too long.
    """
    numbers = count()

    def frame(event: Event) -> bytes:
        number = next(numbers)
        return event_frame({**event, "sequence_number": number}) if number > after else b""

    begun = run.settings.response([], finished_fields(None), None)
    yield b"".join(frame({"type": f"response.{kind}", "response": begun}) for kind in ("created", "in_progress"))
    writer, log, at = OutputWriter(run.settings.hexid, run.settings.calls), run.generation.logs[0], 0
    async with closing(run.generation.read(pace=pace)) as reads:
        async for (delta,) in reads:
            pieces = log.pieces[at : delta.cursor]
            at = delta.cursor
            if frames := b"".join(frame(event) for piece in pieces for event in writer.text(piece)):
                yield frames
    finish = log.finish_reason
    yield b"".join(map(frame, writer.text(log.tail))) + b"".join(map(frame, writer.end(complete=finish == "stop")))
    try:
        await stored(run)
    except StoreError as error:
        yield frame({"type": "error", "code": "store_unavailable", "message": str(error), "param": None})
        return
    if finish == "error":
        run.info.fields["outcome"] = "error"
    fields = finished_fields(finish, error=log.error)
    kind = fields["status"] if fields["status"] in ("completed", "failed") else "incomplete"
    whole = run.settings.response(writer.output, fields, usage([run.generation]))
    yield frame({"type": f"response.{kind}", "response": whole})
