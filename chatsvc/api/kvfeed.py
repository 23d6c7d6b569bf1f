"""The block map for everybody who looks at it: asked of the engine once, encoded once, however many they are.

::

    engine.kv_events() ── Watch: the map as it is now ─┬─ Channel of a tenant: newest changes, one snapshot ── readers
                                                       └─ Channel of another tenant                        ── readers

A map has tens of thousands of blocks, so one copy or one encoding for each reader would be felt by every chat. A reader
keeps nothing but the number of the last frame it was given. One that falls behind what its channel still has gets the
newest snapshot instead. Without keys all share one channel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from chatsvc.api.frames import dumps
from chatsvc.api.sse import closing
from chatsvc.engine.protocol import Engine
from chatsvc.errors import ChatsvcError, EngineDead, Overloaded

log = logging.getLogger("chatsvc.api")

View = dict[str, Any]
Only = Callable[[View], View]  # what one tenant may see of an event

MAX_READERS = 16
INTERVAL = 0.2  # seconds between two whole maps asked of the engine
PATIENCE = 2.0  # seconds that a reader waits for the engine
ROWS = 500  # entries encoded without a pause
PIECE = 65_536  # bytes written at a time: no more of a frame lies in the socket's buffer of a reader who does not read
KEPT = 32  # frames for readers who are late ...
KEPT_BYTES = 1 << 20  # ... but no more than that; the newest one always


async def encode(view: View) -> bytes:
    """An event as JSON, with a pause every few hundred entries."""
    parts = []
    for name, value in view.items():
        if isinstance(value, list):
            slices = []
            for start in range(0, len(value), ROWS):
                slices.append(dumps(value[start : start + ROWS])[1:-1])
                await asyncio.sleep(0)
            parts.append(f'"{name}":[{",".join(slices)}]')
        else:
            parts.append(f'"{name}":{dumps(value)}')
    return ("{" + ",".join(parts) + "}").encode()


async def _frame(view: View) -> bytes:
    return b"data: " + await encode(view) + b"\n\n"


class Channel:
    """The frames of one tenant. Frame ``last`` is the newest; a snapshot counts as the frame that it includes."""

    def __init__(self, watch: Watch, only: Only) -> None:
        self.only = only
        self.last = watch.number
        self.readers = 0
        self._watch = watch
        self._kept: deque[bytes] = deque()
        self._bytes = 0
        self._snapshot: tuple[int, asyncio.Task[bytes]] | None = None
        self._news = asyncio.Event()

    def publish(self, frame: bytes) -> None:
        self.last += 1
        self._kept.append(frame)
        self._bytes += len(frame)
        while len(self._kept) > KEPT or (len(self._kept) > 1 and self._bytes > KEPT_BYTES):
            self._bytes -= len(self._kept.popleft())
        self.wake()

    def wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _lost(self, position: int) -> bool:
        return position < self.last - len(self._kept)

    async def _newest(self) -> tuple[int, bytes]:
        """A snapshot from which the kept frames go on: the one there is, if it will do."""
        if self._snapshot is None or self._lost(self._snapshot[0]):
            view = self.only(self._watch.view())
            self._snapshot = (self._watch.number, asyncio.create_task(_frame(view)))
        number, task = self._snapshot
        return number, await asyncio.shield(task)

    async def frames(self) -> AsyncIterator[bytes]:
        """A snapshot, then each change, until the engine ends; in pieces that follow each other without a pause."""
        position, frame = await self._newest()
        while True:
            for start in range(0, len(frame), PIECE):
                yield frame[start : start + PIECE]
            while position >= self.last:
                if self._watch.ended:
                    return
                await self._news.wait()
            if self._lost(position):
                position, frame = await self._newest()
            else:
                position += 1
                frame = self._kept[position - self.last - 1]


class Watch:
    """One view of the engine's map, and all who read it. It lasts from the first reader to the last."""

    def __init__(self, events: Callable[[], AsyncIterator[View]], delay: float) -> None:
        """``delay``: seconds before the engine is asked."""
        self.channels: dict[str, Channel] = {}
        self.readers = 0
        self.number = 0  # of events that are in the map
        self.ended = False
        self._error: Exception | None = None
        self._begun = asyncio.Event()
        self._head: View = {}
        self._rows: dict[str, dict[Any, Any]] = {"blocks": {}, "sequences": {}}
        self.task = asyncio.create_task(self._run(events, delay))

    async def begun(self) -> None:
        """Until the map is known. Raises what the engine raised; EngineDead."""
        await self._begun.wait()
        if not self.number:
            raise self._error or EngineDead("The engine has stopped")

    def view(self) -> View:
        """The map as it is now, as a snapshot."""
        return {**self._head, **{name: list(rows.values()) for name, rows in self._rows.items()}}

    async def _run(self, events: Callable[[], AsyncIterator[View]], delay: float) -> None:
        try:
            await asyncio.sleep(delay)
            async with closing(events()) as views:
                async for view in views:
                    await self._take(view)
        except Exception as e:
            self._error = e
            if not isinstance(e, ChatsvcError):
                log.exception("the block map cannot be followed")
        finally:
            self.ended = True
            self._begun.set()
            for channel in self.channels.values():
                channel.wake()

    async def _take(self, view: View) -> None:
        if not self.number:
            self._head = {name: value for name, value in view.items() if name not in self._rows}
        for name, rows in self._rows.items():
            rows.update((row["id"], row) for row in view[name])
        for name in view.get("gone", ()):
            self._rows["sequences"].pop(name, None)
        self.number += 1
        self._begun.set()
        # All filters now, before a pause: a channel that is opened meanwhile starts after this event.
        for channel, seen in [(channel, channel.only(view)) for channel in self.channels.values()]:
            channel.publish(await _frame(seen))


class Reader:
    """One reader's place. ``leave`` gives it back."""

    def __init__(self, channel: Channel, leave: Callable[[], None]) -> None:
        self.frames = channel.frames
        self.leave = leave


@dataclass(slots=True)
class _Once:
    """A map for ``GET``, and its encodings by tenant."""

    view: asyncio.Task[View]
    encoded: dict[str, asyncio.Task[bytes]] = field(default_factory=dict)


class KVFeed:
    """Hands out the map.

    Args:
        only: a filter for a tenant; None: everybody may see everything.
    """

    def __init__(self, engine: Engine, only: Callable[[str], Only] | None = None) -> None:
        self._engine = engine
        self._only = only
        self._watch: Watch | None = None
        self._readers = 0
        self._next: _Once | None = None  # not yet begun: who asks now may share it
        self._one_by_one = asyncio.Lock()
        self._asked = -INTERVAL  # when the engine was last asked for a whole map, by the loop's clock

    def _share(self, tenant: str) -> tuple[str, Only]:
        return ("", lambda view: view) if self._only is None else (tenant, self._only(tenant))

    def _wait(self) -> float:
        """Seconds until the engine may be asked for a whole map again; it will be, then."""
        now = asyncio.get_running_loop().time()
        wait = max(0.0, self._asked + INTERVAL - now)
        self._asked = now + wait
        return wait

    # -- once ------------------------------------------------------------------------------------------------------

    async def snapshot(self, tenant: str) -> bytes:
        """The map as JSON, as it was at some moment after the call.

        Raises: Overloaded (503: no answer in time, or still loading), EngineDead.
        """
        once = self._next
        if once is None:
            once = self._next = _Once(asyncio.create_task(self._take()))
            once.view.add_done_callback(lambda task: task.cancelled() or task.exception())
        view = await in_time(asyncio.shield(once.view))
        key, only = self._share(tenant)
        if key not in once.encoded:
            seen = {name: value for name, value in only(view).items() if name != "type"}
            once.encoded[key] = asyncio.create_task(encode(seen))
        return await asyncio.shield(once.encoded[key])

    async def _take(self) -> View:
        async with self._one_by_one:
            await asyncio.sleep(self._wait())
            self._next = None
            async with asyncio.timeout(PATIENCE), closing(self._engine.kv_events()) as events:
                async for view in events:
                    return view
        raise EngineDead("The engine has stopped")

    # -- as a stream -----------------------------------------------------------------------------------------------

    async def join(self, tenant: str) -> Reader:
        """A place among the readers. Whoever gets it calls ``leave`` once.

        Raises: Overloaded (429: no place; 503: no answer in time, or still loading), EngineDead.
        """
        if self._readers >= MAX_READERS:
            raise Overloaded(
                f"The changes of the block map have {MAX_READERS} readers already, which is the most; "
                "GET /debug/kv shows the map once",
                retry_after=5,
            )
        if self._watch is None or self._watch.ended:
            self._watch = Watch(self._engine.kv_events, self._wait())
        watch = self._watch
        self._readers += 1
        watch.readers += 1
        try:
            await in_time(watch.begun())
        except BaseException:
            self._leave(watch)
            raise
        key, only = self._share(tenant)
        channel = watch.channels.get(key)
        if channel is None:
            channel = watch.channels[key] = Channel(watch, only)
        channel.readers += 1
        return Reader(channel, partial(self._leave, watch, key))

    def _leave(self, watch: Watch, key: str | None = None) -> None:
        self._readers -= 1
        watch.readers -= 1
        if key is not None:
            watch.channels[key].readers -= 1
            if not watch.channels[key].readers:
                del watch.channels[key]
        if not watch.readers:
            watch.task.cancel()
            if self._watch is watch:
                self._watch = None


async def in_time(answer: Any) -> Any:
    """The result of an awaitable. Raises: Overloaded (503) when the engine takes too long."""
    try:
        async with asyncio.timeout(PATIENCE):
            return await answer
    except TimeoutError:
        raise Overloaded(
            f"The engine did not show its block map within {PATIENCE:g} seconds", retry_after=2, status=503
        ) from None
