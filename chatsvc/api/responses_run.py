"""A response that is being made, its events, and those who read them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from chatsvc.api.frames import usage
from chatsvc.api.middleware import RequestInfo
from chatsvc.api.responses_object import Settings
from chatsvc.api.responses_output import Event, OutputWriter, event_frame, finished_fields
from chatsvc.api.services import Services
from chatsvc.api.sse import EventStream, closing
from chatsvc.api.turn import Turn
from chatsvc.api.turns import Turns
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


class Readers:
    """Who waits for a response. A turn is held while anybody does."""

    def __init__(self, services: Services, turns: Turns | None) -> None:
        self._services = services
        self._turns = turns

    def stream(self, run: Run, after: int, *, leaves_running: bool) -> EventStream:
        """Its events after the number ``after``. ``leaves_running``: also when this reader leaves."""
        self.come(run)
        settings = self._services.settings
        return EventStream(
            run_events(run, after, self.stored, self._services.pace),
            ping=settings.ping_interval,
            send_timeout=settings.send_timeout,
            on_close=lambda: self.left(run, leaves_running=leaves_running),
        )

    async def stored(self, run: Run) -> None:
        """Until its end is in the store. Raises: StoreError."""
        if run.turn is not None and self._turns is not None:
            await self._turns.stored(run.turn)

    def hold(self, turn: Turn) -> None:
        """A response in the background needs no reader to go on: it counts as one itself."""
        turns = self._turns
        assert turns is not None
        turns.attach(turn)

        def look() -> None:
            if turn.generation.finished:
                turn.generation.unwatch(look)
                turns.detach(turn)

        turn.generation.watch(look)
        look()

    def come(self, run: Run) -> None:
        """A reader is there; it needs one :meth:`left`."""
        if run.turn is not None and self._turns is not None:
            self._turns.attach(run.turn)

    def left(self, run: Run, *, leaves_running: bool) -> None:
        """A reader is gone. One who asked for an answer at once takes the generation with it."""
        if not leaves_running and not run.generation.finished:
            run.info.fields.setdefault("outcome", "client_gone")
            if run.turn is None:
                run.generation.cancel()
            else:
                run.turn.end("cancelled")
        counts = usage([run.generation])
        run.info.fields |= {
            "response": run.settings.id,
            "prompt_tokens": counts["prompt_tokens"],
            "cached_tokens": counts["prompt_tokens_details"]["cached_tokens"],
            "completion_tokens": counts["completion_tokens"],
            "finish": [run.generation.logs[0].finish_reason],
            **{name: value for name, value in counts["timings"].items() if value is not None},
        }
        if run.turn is not None and self._turns is not None:
            self._turns.detach(run.turn)
