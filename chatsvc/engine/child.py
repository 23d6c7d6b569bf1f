"""The engine's own process: ``python -m chatsvc.engine.child SOCKET PARENT``, started by :mod:`chatsvc.engine.remote`.

It runs the same engine with the same text work: where a stop string ends an answer is decided in the step that
completes it, as ever, and the other process, which is busy with sockets, only appends. It hears no signals (they are
the parent's business) and ends as soon as the parent has gone, however that went.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, cast

from prometheus_client.core import Metric

from chatsvc.engine.async_engine import AsyncEngine
from chatsvc.engine.garbage import Collector, settle
from chatsvc.engine.wire import (
    TICK,
    Ask,
    Batch,
    Call,
    ChoiceNews,
    Connection,
    Drop,
    End,
    Limits,
    News,
    Teller,
    Usual,
    connect,
    frame,
    portable,
    receive,
)
from chatsvc.errors import ChatsvcError, Overloaded, RequestError

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
MANY = 128  # news that are told before the step is published to its end: the other process can begin on its core


class Child:
    """One connection's. :meth:`run` ends when the other side has ended, or the engine has died and all is told.

    Args:
        loaded: called when the engine is.

    Attributes:
        status: the exit status of the process.
    """

    def __init__(self, connection: Connection, loaded: Callable[[], None] = lambda: None) -> None:
        self._reader, self._writer = connection
        self._loaded = loaded
        self._engine: AsyncEngine | None = None
        self._tellers: dict[int, Teller] = {}
        self._dirty: dict[int, Teller] = {}
        self._refused: list[News] = []
        self._replies: list[tuple[int, Any, ChatsvcError | None]] = []
        self._wake = asyncio.Event()
        self.status = 0
        self._views: dict[int, tuple[AsyncGenerator[dict[str, Any], None], asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "build": self._build,
            "start": self._start,
            "stop": self._stop,
            "drained": self._drained,
            "metrics": self._metrics,
            "kv_next": self._kv_next,
            "kv_close": self._kv_close,
        }

    async def run(self) -> None:
        pump = asyncio.create_task(self._pump())
        listen = asyncio.create_task(self._listen())
        done, rest = await asyncio.wait({pump, listen}, return_when=asyncio.FIRST_COMPLETED)
        for task in rest:
            task.cancel()
        for task in done:
            task.result()

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await receive(self._reader))
        except EOFError:
            return

    @property
    def engine(self) -> AsyncEngine:
        assert self._engine is not None, "build comes first"
        return self._engine

    def _take(self, message: Ask | Drop | Call) -> None:
        if isinstance(message, Call):
            self._keep(self._answer(message))
        elif isinstance(message, Ask):
            self._generate(message)
        elif (known := self._tellers.get(message.key)) is not None:
            known.generation.cancel(message.error, message.status)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _generate(self, ask: Ask) -> None:
        try:
            generation = self.engine.generate(
                request_id=ask.request_id,
                prompt_token_ids=ask.prompt_token_ids,
                params=ask.params,
                tenant=ask.tenant,
                cache_salt=ask.cache_salt,
                priority=ask.priority,
            )
        except Exception as e:
            if not isinstance(e, ChatsvcError):
                log.exception("request %s could not be started", ask.request_id)
            status = e.status if isinstance(e, RequestError | Overloaded) else 500
            end: End = ("error", "", None, str(e), status)
            choices: list[ChoiceNews] = [(i, [], [], None, "", end) for i in range(ask.params.n)]
            self._refused.append((ask.key, 0, (None, None, None), choices, True))
            self._wake.set()
            return
        teller = self._tellers[ask.key] = Teller(ask.key, generation)

        def touched() -> None:
            if not teller.done:
                self._dirty[ask.key] = teller
                self._wake.set()
                if len(self._dirty) >= MANY and not self._writer.transport.get_write_buffer_size():
                    self._writer.write(frame(self._batch()))

        generation.watch(touched)

    # -- telling -----------------------------------------------------------------------------------------------

    async def _pump(self) -> None:
        """One message for all that has happened since the last; when the other side is slow, they get larger, not
        more."""
        while True:
            try:
                async with asyncio.timeout(TICK):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            self._writer.write(frame(self._batch()))
            try:
                await self._writer.drain()
                if self._engine is not None and self._engine.dead is not None:  # all has been told
                    self._writer.transport.set_write_buffer_limits(0)
                    await self._writer.drain()
                    self.status = 1
                    return
            except ConnectionError:  # the other side has ended
                return

    def _batch(self) -> Batch:
        dirty, self._dirty = self._dirty, {}
        refused, self._refused = self._refused, []
        replies, self._replies = self._replies, []
        usual: Usual = ([], [], [])
        news: list[News] = []
        for key, teller in dirty.items():
            teller.tell(usual, news)
            if teller.done:
                del self._tellers[key]
        healthy = self._engine is None or self._engine.healthy
        return Batch(usual, news + refused, replies, healthy)

    async def _answer(self, call: Call) -> None:
        result, error = None, None
        try:
            result = await self._methods[call.method](*call.args)
        except Exception as e:
            if not isinstance(e, ChatsvcError):
                log.exception("%s failed", call.method)
            error = portable(e)
        self._replies.append((call.number, result, error))
        self._wake.set()

    # -- calls -------------------------------------------------------------------------------------------------

    async def _build(self, where: str, args: tuple[Any, ...]) -> Limits:
        """``where``: ``module:function``; what it returns is the engine, or has it as ``engine``."""
        module, _, name = where.partition(":")
        built = await asyncio.to_thread(lambda: getattr(importlib.import_module(module), name)(*args))
        engine = built if isinstance(built, AsyncEngine) else built.engine
        assert isinstance(engine, AsyncEngine)
        self._engine = engine
        c = engine.config
        return Limits(c.block_size, c.max_queue, c.stuck_after, c.give_up_after)

    async def _start(self) -> Any:
        await self.engine.start()
        self._loaded()
        self._keep(Collector(lambda: self.engine.num_requests > 0).run())
        return self.engine.capacity

    async def _stop(self) -> None:
        await self.engine.stop()

    async def _drained(self, timeout: float) -> bool:  # noqa: ASYNC109  see AsyncEngine.drained
        return await self.engine.drained(timeout)

    async def _metrics(self) -> list[Metric]:
        return list(self.engine.metrics.registry.collect())

    async def _kv_next(self, number: int) -> dict[str, Any] | None:
        """The next event of view ``number``: asked for one by one, so that a slow reader gets fewer, larger ones."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        known = self._views.get(number)
        view = known[0] if known else cast(AsyncGenerator[dict[str, Any], None], self.engine.kv_events())
        self._views[number] = (view, task)
        return await anext(view, None)

    async def _kv_close(self, number: int) -> None:
        known = self._views.pop(number, None)
        if known is not None:
            view, asked = known
            asked.cancel()
            await asyncio.wait([asked])
            await view.aclose()


def die_with(parent: int) -> None:
    """Linux: be killed when the parent ends, even while stopped. Elsewhere the end of the socket has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


async def main(sock: socket.socket) -> None:
    child = Child(await connect(sock), loaded=settle)
    await child.run()
    logging.shutdown()
    os._exit(child.status)  # here, for a thread that hangs in a step would be waited for


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    die_with(int(sys.argv[2]))
    gc.disable()  # until all is loaded: see settle
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    asyncio.run(main(socket.socket(fileno=int(sys.argv[1]))))
