"""An engine in a process of its own, as the API sees it: the same interface, the logs filled from messages.

Why: the interpreter's lock. Steps are planned, and torch is handed its work, beside nothing else there; the sockets of
many readers are served beside nothing else here.

What the two know of each other: the end of the socket (death, however it came) and the time since the last message
(a stopped process, an endless loop). A dead engine is not started again: everything that ran has ended with an error,
and the server ends, too, so that whoever watches over it starts it again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial
from typing import Any

from chatsvc.config import ServeConfig
from chatsvc.engine.checks import Admission
from chatsvc.engine.output import FinishReason, Generation
from chatsvc.engine.protocol import Built, text_side
from chatsvc.engine.remote_metrics import RemoteMetrics
from chatsvc.engine.wire import (
    Ask,
    Batch,
    Call,
    Connection,
    Drop,
    Limits,
    PlainTokens,
    connect,
    frame,
    hear,
    hear_usual,
    receive,
)
from chatsvc.errors import ChatsvcError, EngineDead
from chatsvc.scheduler.params import SamplingParams
from chatsvc.tasks import end

log = logging.getLogger(__name__)

WATCH = 0.1  # seconds between looks at the clock
STOP_SECONDS = 10.0  # for the last save of the disk cache, beside the time for a step that does not end


class RemoteEngine(Admission):
    """:meth:`launch` it, then as ``AsyncEngine``; see :class:`chatsvc.engine.protocol.ServedEngine`."""

    def __init__(self, process: subprocess.Popen[bytes], connection: Connection) -> None:
        super().__init__()
        self._process = process
        self._reader, self._writer = connection
        self._limits = Limits(16, 1, 10.0, 60.0)
        self._numbers = itertools.count()
        self._known: dict[int, Generation] = {}  # by key, until the engine's process has told their end
        self._keys: dict[str, int] = {}
        self._unscheduled: set[int] = set()  # of the known ones
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._tokens = PlainTokens()
        self._heard = time.perf_counter()
        self._its_health = True
        self._closed = False
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]
        self.metrics = RemoteMetrics(lambda: self._call("metrics"))

    # -- life --------------------------------------------------------------------------------------------------

    @classmethod
    async def launch(cls, where: str, *args: Any) -> RemoteEngine:
        """Start the process and build the engine in it.

        Args:
            where: ``module:function`` that builds it there; see ``Child``.
            args: its arguments, plain data.

        Raises:
            ConfigError, ModelError: as that function.
            EngineDead: the process ended.
        """
        here, there = socket.socketpair()
        with there:
            process = subprocess.Popen(  # noqa: ASYNC220  some milliseconds, once, and from this thread: see die_with
                [sys.executable, "-P", "-m", "chatsvc.engine.child", str(there.fileno()), str(os.getpid())],
                pass_fds=(there.fileno(),),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a Ctrl-C in the terminal is for the parent alone
            )
        engine = cls(process, await connect(here))
        try:
            engine._limits = await engine._call("build", where, args)
        except BaseException:
            await engine._end()
            raise
        return engine

    async def start(self) -> None:
        """Load the model and begin to step. Raises: ConfigError, ModelError, EngineDead."""
        self._capacity = await self._call("start")

    async def stop(self) -> None:
        """End everything that still runs, and the process. Idempotent."""
        self._draining = True
        with suppress(TimeoutError, ChatsvcError):
            async with asyncio.timeout(self._limits.stuck_after + STOP_SECONDS if self.healthy else 1.0):
                await self._call("stop")
        await self._end()
        for generation in list(self._known.values()):
            _cut(generation, "error", "the server was shut down before the answer was complete", 503)
        self._forget_all()

    async def _end(self) -> None:
        """The end of the socket ends the process; if it does not, it is killed."""
        self._closed = True
        await end(*self._tasks)
        self._writer.transport.abort()
        try:
            await asyncio.to_thread(self._process.wait, 2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._fail_calls()

    async def drained(self, timeout: float) -> bool:  # noqa: ASYNC109  the answer is a bool, not an exception
        """Until nothing runs, or ``timeout`` seconds. Returns whether nothing runs."""
        try:
            async with asyncio.timeout(timeout + 1):
                return bool(await self._call("drained", timeout))
        except TimeoutError:
            return False
        except EngineDead:
            return True

    # -- what callers see --------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """False when the engine or its process died, has been stuck in a step, or has been silent, for too long.

        While the model loads, silence means nothing: imports and compilers hold the interpreter.
        """
        silent = time.perf_counter() - self._heard
        return self._dead is None and self._its_health and (self._capacity is None or silent < self._limits.stuck_after)

    @property
    def num_requests(self) -> int:
        return len(self._known)

    @property
    def num_queued(self) -> int:
        # Those that were cancelled and of which the other process has not yet heard count, too: so what waits in the
        # socket is bounded, however many come and go.
        return len(self._unscheduled)

    @property
    def _bounds(self) -> Limits:
        return self._limits

    def _knows(self, request_id: str) -> bool:
        return request_id in self._keys

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def generate(
        self,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        tenant: str = "",
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """As ``AsyncEngine.generate``: everything that can be refused is refused here, at once."""
        self._check(request_id, prompt_token_ids, params)
        key = next(self._numbers)
        now = time.perf_counter()
        generation = Generation(request_id, prompt_token_ids, params.n, partial(self._cancel, key), now)
        self._known[key] = generation
        self._keys[request_id] = key
        self._unscheduled.add(key)
        self._send(Ask(key, request_id, prompt_token_ids, params, tenant, cache_salt, priority))
        return generation

    def cancel(self, request_id: str) -> bool:
        """Stop a request; False when nothing of that name runs."""
        key = self._keys.get(request_id)
        if key is None or self._known[key].finished:
            return False
        self._cancel(key)
        return True

    def _cancel(self, key: int, error: str | None = None, status: int = 500) -> None:
        generation = self._known.get(key)
        if generation is not None and not generation.finished:
            _cut(generation, "abort" if error is None else "error", error, status)
            self._send(Drop(key, error, status))

    async def kv_events(self) -> AsyncIterator[dict[str, Any]]:
        """First the whole state, then what changed, at most ten times a second."""
        number = next(self._numbers)
        try:
            while (event := await self._call("kv_next", number)) is not None:
                yield event
        except EngineDead:
            return
        finally:
            self._send(Call(next(self._numbers), "kv_close", (number,)))

    # -- the socket --------------------------------------------------------------------------------------------

    def _send(self, message: Ask | Drop | Call) -> None:
        if self._dead is None and not self._closed:
            self._writer.write(frame(message))

    async def _call(self, method: str, *args: Any) -> Any:
        if self._dead is not None or self._closed:
            raise EngineDead(self._dead or "the engine was stopped")
        number = next(self._numbers)
        reply = self._calls[number] = asyncio.get_running_loop().create_future()
        self._send(Call(number, method, args))
        try:
            return await reply
        finally:
            self._calls.pop(number, None)

    async def _listen(self) -> None:
        try:
            while True:
                self._take(await receive(self._reader))
        except asyncio.CancelledError:
            raise
        except BaseException as e:
            if not isinstance(e, EOFError):
                log.exception("the engine's messages cannot be read")
            status = await asyncio.to_thread(self._status)
            self._die(f"the engine's process has ended ({status})")

    def _take(self, batch: Batch) -> None:
        self._heard = time.perf_counter()
        self._its_health = batch.healthy
        hear_usual(self._known, batch.usual, self._tokens)
        for news in batch.news:
            generation = self._known.get(news[0])
            if generation is not None:
                hear(generation, news, self._tokens)
                if generation.timings.scheduled is not None:
                    self._unscheduled.discard(news[0])
                if news[4]:
                    self._forget(news[0])
        for number, result, error in batch.replies:
            reply = self._calls.get(number)
            if reply is None or reply.done():
                continue
            if error is not None:
                reply.set_exception(error)
            else:
                reply.set_result(result)

    def _forget(self, key: int) -> None:
        generation = self._known.pop(key)
        self._unscheduled.discard(key)
        if self._keys.get(generation.request_id) == key:
            del self._keys[generation.request_id]

    def _forget_all(self) -> None:
        self._known.clear()
        self._keys.clear()
        self._unscheduled.clear()

    async def _watch(self) -> None:
        """How late the loop is; and an end for those who wait for a process that does not move."""
        while True:
            due = time.perf_counter() + WATCH
            await asyncio.sleep(WATCH)
            self.metrics.loop_lag.observe(max(0.0, time.perf_counter() - due))
            limit = self._limits.give_up_after
            if self._capacity is not None and time.perf_counter() - self._heard > limit:
                for key in self._known:
                    self._cancel(key, f"the engine's process has been silent for {limit:g} s", 503)

    # -- death -------------------------------------------------------------------------------------------------

    def _status(self) -> str:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "it closed its socket"
        return f"by signal {-code}" if code < 0 else f"exit status {code}"

    def _die(self, why: str) -> None:
        log.error("%s", why)
        self._dead = why
        for generation in list(self._known.values()):
            _cut(generation, "error", why, 503)
        self._forget_all()
        self._fail_calls()

    def _fail_calls(self) -> None:
        for reply in self._calls.values():
            if not reply.done():
                reply.set_exception(EngineDead(self._dead or "the engine was stopped"))


def _cut(generation: Generation, reason: FinishReason, error: str | None = None, status: int = 500) -> None:
    """End what has not ended, here and now, with the text that was held back."""
    for choice in generation.logs:
        if choice.finish_reason is None:
            choice.tail = choice.held
            choice.error, choice.error_status, choice.finish_reason = error, status, reason
    if generation.timings.finished is None:
        generation.timings.finished = time.perf_counter()
    generation.notify()


async def launch(config: ServeConfig) -> Built[RemoteEngine]:
    """The engine of a configuration, in a process of its own, and the text side, which is here.

    Raises: ConfigError, ModelError, EngineDead.
    """
    text = text_side(config)
    engine = await RemoteEngine.launch("chatsvc.engine.build:build", config)
    return Built(engine, text.tokenizer, text.template, text.files)
