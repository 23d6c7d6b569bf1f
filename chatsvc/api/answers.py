"""From running generations to a response: streamed or whole, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from chatsvc.api.errors import DeadlineExceeded
from chatsvc.api.frames import DONE, Shape, dumps_in_slices, exception_event, usage
from chatsvc.api.middleware import RequestInfo
from chatsvc.api.search import best
from chatsvc.api.services import Services
from chatsvc.api.sse import EventStream, closing
from chatsvc.api.timings import told
from chatsvc.engine.output import FAILED, Delta, Generation, OutputLog
from chatsvc.engine.wake import Pace
from chatsvc.errors import ChatsvcError, EngineError, Overloaded

log = logging.getLogger("chatsvc.api")

CLIENT_GONE = 499  # nobody sees it; for the log line


@dataclass(frozen=True, slots=True)
class Answer:
    """The generations of one request (one per prompt; choice ``i`` of prompt ``p`` has the index ``p * n + i``).

    ``n``: choices that are returned of each; more were sampled with ``best_of``.
    """

    generations: Sequence[Generation]
    shape: Shape
    info: RequestInfo
    services: Services
    n: int

    def stream(self, *, include_usage: bool) -> Response:
        """Server-sent events."""
        return EventStream(
            self.events(include_usage=include_usage),
            ping=self.services.settings.ping_interval,
            send_timeout=self.services.settings.send_timeout,
            on_close=self.close,
        )

    async def events(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """The events, one item per read of the logs. A fault ends them with one error event and no ``[DONE]``."""
        only, pace = self.generations[0] if len(self.generations) == 1 else None, self.services.pace
        try:
            if only is not None:
                async with closing(only.read(pace=pace)) as reads:
                    async for news in reads:
                        if frame := self._frame(0, news):
                            yield frame
            else:
                async with closing(merged(self.generations, pace)) as items:
                    async for position, news in items:
                        if frame := self._frame(position, news):
                            yield frame
        except ChatsvcError as exc:
            self.info.fields["outcome"] = "error"
            yield exception_event(exc)
            return
        except Exception as exc:
            self.info.fields["outcome"] = "error"
            log.exception("stream of request %s failed", self.info.id)
            yield exception_event(exc)
            return
        yield (self.shape.usage_chunk(usage(self.generations)) if include_usage else b"") + DONE

    def _frame(self, position: int, news: list[Delta]) -> bytes:
        generation = self.generations[position]
        first = position * len(generation.logs)
        out = []
        for delta in news:
            if delta.finish_reason == "error":
                raise failure(generation.logs[delta.index])
            out.append(self.shape.chunk(first + delta.index, delta, generation.logs[delta.index]))
        return b"".join(out)

    async def whole(self, request: Request) -> Response:
        """One JSON body.

        Raises:
            EngineError, Overloaded: a choice failed; Overloaded when the server, not the choice, was the reason.
        """
        try:
            if await until_ended(request, self.generations):
                logs = self._logs()
                size = self.shape.work * sum(len(choice.tokens) for choice in logs)
                return Response(await self.services.offload(size, self._body, logs), media_type="application/json")
            self.info.fields["outcome"] = "client_gone"
            return Response(status_code=CLIENT_GONE)
        finally:
            self.close()

    def _body(self, logs: list[OutputLog]) -> str:
        return dumps_in_slices(self.shape.body(logs, usage(self.generations)))

    def _logs(self) -> list[OutputLog]:
        for generation in self.generations:
            for choice in generation.logs:
                if choice.finish_reason == "error":
                    raise failure(choice)
        return [choice for generation in self.generations for choice in best(generation.logs, self.n)]

    def close(self) -> None:
        """Stop what still runs and write down what happened. Idempotent."""
        for generation in self.generations:
            if not generation.finished:
                self.info.fields.setdefault("outcome", "client_gone")
                generation.cancel()
        self._note()

    def _note(self) -> None:
        counts = usage(self.generations)
        fields = self.info.fields
        fields["prompt_tokens"] = counts["prompt_tokens"]
        fields["cached_tokens"] = counts["prompt_tokens_details"]["cached_tokens"]
        fields["completion_tokens"] = counts["completion_tokens"]
        fields["finish"] = [choice.finish_reason for g in self.generations for choice in g.logs]
        fields.update(told(self.generations))


def failure(choice: OutputLog) -> ChatsvcError:
    """Why a choice failed, as the exception that has the right HTTP status."""
    message = choice.error or FAILED
    if choice.error_status == 408:
        return DeadlineExceeded(message)
    return Overloaded(message, retry_after=5, status=503) if choice.error_status == 503 else EngineError(message)


async def until_ended(request: Request, generations: Sequence[Generation]) -> bool:
    """Until all generations ended (True) or the client has left (False)."""

    async def all_ended() -> None:
        for generation in generations:
            await generation.wait()

    done = asyncio.create_task(all_ended())
    gone = asyncio.create_task(client_gone(request))
    try:
        await asyncio.wait({done, gone}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
            return True
        return False
    finally:
        gone.cancel()
        done.cancel()
        await asyncio.gather(gone, done, return_exceptions=True)


async def client_gone(request: Request) -> None:
    """Until the client has left. The body has been read: the next message can only be the disconnect."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def merged(generations: Sequence[Generation], pace: Pace | None = None) -> AsyncIterator[tuple[int, list[Delta]]]:
    """What is new in several generations, with the position of each."""
    # One slot: a reader that is slow finds everything since its last look in the next item.
    queue: asyncio.Queue[tuple[int, list[Delta]] | Exception | None] = asyncio.Queue(maxsize=1)

    async def pump(position: int, generation: Generation) -> None:
        try:
            async for news in generation.read(pace=pace):
                await queue.put((position, news))
            await queue.put(None)
        except Exception as exc:
            await queue.put(exc)

    tasks = [asyncio.create_task(pump(i, g)) for i, g in enumerate(generations)]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
