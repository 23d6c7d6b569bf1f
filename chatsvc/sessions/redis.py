"""Sessions in Redis: shared by several server processes, and kept when one of them goes.

Keys (``{...}`` is the hash tag: all keys of a session live in one cluster slot; every key has a time to live):

- ``chatsvc:{<session>}:meta``, ``chatsvc:{<session>}:msgs``: see :mod:`chatsvc.sessions.redis_scripts`.
- ``chatsvc:{tenant-<digest>}:...``: see :mod:`chatsvc.sessions.redis_index`.
- ``chatsvc:{running}``: hash ``<session>:<message>`` -> ``<instance>:<tenant>`` of turns under way.
- ``chatsvc:{instance-<id>}:alive``: the lease of a server process, which it renews. When it has ended, the process's
  running turns count as interrupted, whoever reads them; so a starting process never interrupts the turns of its living
  neighbours. Nobody is declared dead while it may only be Redis that was away: see ``_dead``.
- ``chatsvc:{live}:...``: see :mod:`chatsvc.sessions.redis_relay`.

Every operation runs to its end in a task of its own (:class:`~chatsvc.sessions.guard.Guard`), so a caller who leaves
cannot leave a reply on the wire. Commands are retried by redis-py after a lost connection; all of them are idempotent.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff  # type: ignore[attr-defined]
from redis.exceptions import RedisError

from chatsvc.errors import ConfigError, Conflict, NotFound, StoreError
from chatsvc.sessions import redis_scripts as scripts
from chatsvc.sessions.base import Kind, Message, Session, TurnOver, TurnRunning
from chatsvc.sessions.codec import (
    MAX_SESSION_BYTES,
    MAX_SESSION_MESSAGES,
    check_one_running,
    decode,
    encode,
    is_id,
    session_full,
)
from chatsvc.sessions.guard import Guard
from chatsvc.sessions.redis_connect import AWAY, pool_of, why_never
from chatsvc.sessions.redis_index import SessionIndex, meta_key, session_of
from chatsvc.sessions.redis_relay import BLOCK, LOG_LENGTH, RedisRelay
from chatsvc.tasks import end

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
COMMAND_TIMEOUT = 2.0
RETRIES = 2
DEADLINE = 3.0
LEASE = 10.0
HEARTBEATS = 4  # in a lease

_RUNNING = "chatsvc:{running}"


class RedisStore:
    """Args:
    url: see :mod:`chatsvc.sessions.redis_connect`. An unreachable server is no error here nor in ``open()``: the
        service starts, session calls raise StoreError, and all heals when the server comes. One that does not want us,
        or that we must not believe, is: ``open()`` raises ConfigError.
    ttl: seconds of life after the last read or write.
    clock: Unix time in seconds.
    lease: seconds after which a process that has not been heard of counts as dead.
    log_length: batches that the log of a running answer keeps.
    """

    def __init__(
        self,
        url: str,
        ttl: float,
        clock: Callable[[], float] = time.time,
        *,
        lease: float = LEASE,
        log_length: int = LOG_LENGTH,
    ) -> None:
        self._pool: Any = pool_of(
            aioredis.BlockingConnectionPool,
            url,
            max_connections=MAX_CONNECTIONS,
            timeout=COMMAND_TIMEOUT,
            socket_timeout=COMMAND_TIMEOUT,
            retry=Retry(ExponentialWithJitterBackoff(cap=0.5, base=0.05), RETRIES),
            health_check_interval=15,
        )
        blocking_pool = pool_of(
            aioredis.ConnectionPool,
            url,
            max_connections=1,
            socket_timeout=BLOCK + COMMAND_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
        )
        self._client: Any = aioredis.Redis.from_pool(self._pool)  # type: ignore[attr-defined]
        self._ttl_ms = max(1, int(ttl * 1000))
        self._index = SessionIndex(self._client, self._ttl_ms)
        self._clock = clock
        self._guard = Guard("Redis", DEADLINE, (RedisError, *AWAY), AWAY)
        self._instance = secrets.token_hex(8)
        self._lease = lease
        blocking: Any = aioredis.Redis.from_pool(blocking_pool)  # type: ignore[attr-defined]
        self._relay = RedisRelay(self._instance, self._client, blocking, self._guard, log_length)
        self._alive_key = f"chatsvc:{{instance-{self._instance}}}:alive"
        self._heart: asyncio.Task[None] | None = None
        self._create_script = self._client.register_script(scripts.CREATE)
        self._get_script = self._client.register_script(scripts.GET)
        self._patch_script = self._client.register_script(scripts.PATCH)
        self._delete_script = self._client.register_script(scripts.DELETE)
        self._append_script = self._client.register_script(scripts.APPEND)
        self._update_script = self._client.register_script(scripts.UPDATE)
        self._rewrite_script = self._client.register_script(scripts.REWRITE)

    @property
    def relay(self) -> RedisRelay:
        return self._relay

    async def open(self) -> None:
        try:
            await self._guard.run(self._beat())
        except StoreError as error:
            if why := why_never(error, self._pool.connection_kwargs):
                raise ConfigError(f"--session-store: {why}") from None
            log.warning("Redis is not there yet; session calls answer 503 until it is (%s)", error)
        self._relay.open()
        self._heart = asyncio.create_task(self._heartbeat())

    async def close(self) -> None:
        if self._heart is not None:
            await end(self._heart)
            self._heart = None
            await self._guard.drain()
            try:
                await asyncio.wait_for(self._client.delete(self._alive_key), DEADLINE)
            except (TimeoutError, RedisError, OSError):
                pass  # the lease ends by itself
        await self._relay.close()
        await self._client.aclose()
        await self._pool.aclose()

    async def ping(self) -> None:
        await self._guard.run(self._client.ping())

    async def create(self, session: Session) -> None:
        await self._guard.run(self._create(session))

    async def get(self, tenant: str, session_id: str) -> Session | None:
        return await self._guard.run(self._get(tenant, session_id))

    async def list(self, tenant: str, limit: int = 50, kind: Kind | None = None) -> list[Session]:
        return await self._guard.run(self._index.list(tenant, limit, kind))

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None:
        return await self._guard.run(self._patch(tenant, session_id, title, system))

    async def delete(self, tenant: str, session_id: str) -> bool:
        return await self._guard.run(self._delete(tenant, session_id))

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._guard.run(self._append(tenant, session_id, messages))

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        await self._guard.run(self._update(tenant, session_id, message))

    async def rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._guard.run(self._rewrite(tenant, session_id, messages))

    async def interrupt_running(self) -> int:
        return await self._guard.run(self._interrupt_running())

    # One coroutine per operation; they run inside the guard.

    async def _create(self, session: Session) -> None:
        if not is_id(session.id):
            raise Conflict("This cannot be the id of a session.")
        check_one_running(None, session.messages)
        await self._note_running(session.tenant, session.id, session.messages)
        reply = await self._call(
            self._create_script, session.tenant, session.id,
            secrets.token_hex(8), MAX_SESSION_MESSAGES, MAX_SESSION_BYTES, self._turn_of(session.messages),
            session.title, session.system,
            repr(session.created_at), repr(session.updated_at), *self._encoded(session.messages),
        )  # fmt: skip
        if reply == 0:
            raise Conflict("There is already a session with this id.")
        _check(reply)
        await self._index.put(session.tenant, session.id, session.updated_at)
        await self._index.prune(session.tenant, session.id)

    async def _get(self, tenant: str, session_id: str) -> Session | None:
        return await self._session(tenant, session_id, self._get_script)

    async def _patch(self, tenant: str, session_id: str, title: str | None, system: str | None) -> Session | None:
        fields = [x for k, v in (("title", title), ("system", system)) if v is not None for x in (k, v)]
        now = self._clock()
        if fields:
            fields += ["updated_at", repr(now)]
        session = await self._session(tenant, session_id, self._patch_script, *fields)
        if session is not None and fields:
            await self._index.put(tenant, session_id, now)
        return session

    async def _delete(self, tenant: str, session_id: str) -> bool:
        if await self._call(self._delete_script, tenant, session_id) == scripts.NO_SESSION:
            return False
        await self._index.drop(tenant, session_id)
        return True

    async def _append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        if sum(m.status == "running" for m in messages) > 1:
            if await self._get(tenant, session_id) is None:
                raise NotFound("There is no such session.")
            check_one_running(None, messages)
        noted = await self._note_running(tenant, session_id, messages)
        now = self._clock()
        reply = await self._call(
            self._append_script, tenant, session_id,
            repr(now), MAX_SESSION_MESSAGES, MAX_SESSION_BYTES, self._turn_of(messages), *self._encoded(messages),
        )  # fmt: skip
        if reply != 1 and noted:
            await self._client.hdel(_RUNNING, *noted)
        _check(reply)
        await self._index.put(tenant, session_id, now)

    async def _update(self, tenant: str, session_id: str, message: Message) -> None:
        noted = await self._note_running(tenant, session_id, [message])
        now, body = self._clock(), self._encode(message)
        ended = "" if message.status == "running" else "ended"
        token = _token(message.id, self._instance)
        reply = await self._call(self._update_script, tenant, session_id, repr(now), message.id, body, "", token, ended)
        if is_id(session_id) and (message.status != "running" or (reply != 1 and noted)):
            await self._client.hdel(_RUNNING, f"{session_id}:{message.id}")
        _check(reply)
        await self._index.put(tenant, session_id, now)

    async def _rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        _check(await self._call(self._rewrite_script, tenant, session_id, *self._encoded(messages)))

    async def _note_running(self, tenant: str, session_id: str, messages: Sequence[Message]) -> Sequence[str]:
        """First the note, then the turn: never a running turn that nobody would end. Returns the notes' names."""
        if not is_id(session_id):
            return []
        names = [f"{session_id}:{m.id}" for m in messages if m.status == "running"]
        if names:
            await self._client.hset(_RUNNING, mapping=dict.fromkeys(names, f"{self._instance}:{tenant}"))
            await self._client.pexpire(_RUNNING, self._ttl_ms)
        return names

    async def _session(self, tenant: str, session_id: str, script: Any, *args: str) -> Session | None:
        reply = await self._call(script, tenant, session_id, *args)
        if reply == scripts.NO_SESSION:
            return None
        flat, values = reply
        session = session_of(session_id, dict(zip(flat[::2], flat[1::2])))
        numbered = []
        for value in values:
            seq, _, body = value.partition(":")
            message = decode(body)
            if message.status == "running":
                message = await self._judge(tenant, session_id, value, message)
            numbered.append((int(seq), message))
        session.messages = [m for _, m in sorted(numbered, key=lambda pair: pair[0])]
        await self._index.keep(tenant, session_id)
        return session

    async def _judge(self, tenant: str, session_id: str, value: str, message: Message) -> Message:
        """A turn still marked running: interrupted when the process that ran it is dead."""
        if not await self._dead(message.owner):
            return message
        await self._interrupt(tenant, session_id, value, message)
        return replace(message, status="interrupted", owner="")

    async def _dead(self, owner: str) -> bool:
        """Whether a process has lost its lease, and had the time to renew it: Redis has been there for a whole lease
        since it started, and since we last could not reach it."""
        if owner == self._instance or await self._client.exists(f"chatsvc:{{instance-{owner}}}:alive"):
            return False
        lost_at = self._guard.lost_at
        if lost_at is not None and time.monotonic() - lost_at <= self._lease:
            return False
        info = await self._client.info("server")
        return float(info["uptime_in_seconds"]) > self._lease

    async def _interrupt(self, tenant: str, session_id: str, value: str, message: Message) -> bool:
        body = self._encode(replace(message, status="interrupted"))
        token = _token(message.id, message.owner)
        reply = await self._call(self._update_script, tenant, session_id, "", message.id, body, value, token, "ended")
        await self._client.hdel(_RUNNING, f"{session_id}:{message.id}")
        return cast(bool, reply == 1)

    async def _interrupt_running(self) -> int:
        count = 0
        for name, note in (await self._client.hgetall(_RUNNING)).items():
            session_id, _, message_id = name.partition(":")
            owner, _, tenant = note.partition(":")
            if owner != self._instance and not await self._dead(owner):
                continue
            value = await self._client.hget(_messages_key(session_id), message_id)
            message = None if value is None else decode(value.partition(":")[2])
            if message is None or message.status != "running":
                await self._client.hdel(_RUNNING, name)
            elif await self._interrupt(tenant, session_id, value, message):
                count += 1
        return count

    async def _call(self, script: Any, tenant: str, session_id: str, *args: object) -> Any:
        if not is_id(session_id):
            return scripts.NO_SESSION
        return await script(keys=[meta_key(session_id), _messages_key(session_id)], args=[tenant, self._ttl_ms, *args])

    def _encode(self, message: Message) -> str:
        """With its owner while it runs."""
        return encode(replace(message, owner=self._instance if message.status == "running" else ""))

    def _turn_of(self, messages: Sequence[Message]) -> str:
        """The token of the running answer among the messages that a call appends, or empty."""
        running = [m for m in messages if m.status == "running"]
        return _token(running[0].id, self._instance) if running else ""

    def _encoded(self, messages: Sequence[Message]) -> Sequence[str]:
        return [x for m in messages for x in (m.id, self._encode(m))]

    async def _beat(self) -> None:
        await self._client.set(self._alive_key, "1", px=int(self._lease * 1000))

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(self._lease / HEARTBEATS)
            with suppress(StoreError):  # logged by the guard
                await self._guard.run(self._beat())


def _messages_key(session_id: str) -> str:
    return f"chatsvc:{{{session_id}}}:msgs"


def _token(message_id: str, owner: str) -> str:
    return f"{message_id}@{owner}"


def _check(reply: int | str) -> None:
    if isinstance(reply, str):
        raise TurnRunning(reply.partition("@")[0])
    if reply == scripts.NO_SESSION:
        raise NotFound("There is no such session.")
    if reply == scripts.NO_MESSAGE:
        raise NotFound("There is no such message.")
    if reply == scripts.OVER:
        raise TurnOver
    if reply == scripts.FULL:
        raise session_full()
