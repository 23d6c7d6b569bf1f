"""Which sessions a tenant has in Redis: a hint for listing only.

Keys: ``chatsvc:{tenant-<digest>}:sessions`` and ``...:responses``, sorted sets of a tenant's session ids by last
change, one for each kind. What they name is looked up and checked; names of expired sessions are dropped on the way.
"""

from __future__ import annotations

import hashlib
from typing import Any

from chatsvc.sessions.base import Kind, Session
from chatsvc.sessions.codec import KINDS, kind_of

Sessions = list[Session]

PRUNED = 8  # names looked at for each new session


class SessionIndex:
    """Args:
    client: a redis-py client that decodes replies; its errors are the caller's.
    ttl_ms: milliseconds of life after the last read or write.
    """

    def __init__(self, client: Any, ttl_ms: int) -> None:
        self._client = client
        self._ttl_ms = ttl_ms

    async def put(self, tenant: str, session_id: str, updated_at: float) -> None:
        key = _key(tenant, kind_of(session_id))
        await self._client.zadd(key, {session_id: updated_at})
        await self._client.pexpire(key, self._ttl_ms)

    async def keep(self, tenant: str, session_id: str) -> None:
        """A session was read: its name lives as long as it."""
        await self._client.pexpire(_key(tenant, kind_of(session_id)), self._ttl_ms)

    async def drop(self, tenant: str, session_id: str) -> None:
        await self._client.zrem(_key(tenant, kind_of(session_id)), session_id)

    async def prune(self, tenant: str, session_id: str) -> None:
        """Drops a few names of expired sessions of the same kind, so that the index of a busy tenant follows the living
        ones."""
        key = _key(tenant, kind_of(session_id))
        some = await self._client.zrandmember(key, PRUNED) or []
        async with self._client.pipeline(transaction=False) as pipe:
            for name in some:
                pipe.exists(meta_key(name))
            gone = [s for s, there in zip(some, await pipe.execute()) if not there]
        if gone:
            await self._client.zrem(key, *gone)

    async def list(self, tenant: str, limit: int, kind: Kind | None) -> Sessions:
        """The last changed first, without their messages."""
        kinds = KINDS if kind is None else (kind,)
        found = [s for one in kinds for s in await self._list_kind(tenant, limit, one)]
        found.sort(key=lambda s: (s.updated_at, s.id), reverse=True)
        return found[:limit]

    async def _list_kind(self, tenant: str, limit: int, kind: Kind) -> Sessions:
        key, found, at = _key(tenant, kind), Sessions(), 0
        while len(found) < limit:
            ids = await self._client.zrevrange(key, at, at + limit - 1)
            if not ids:
                break
            gone = []
            async with self._client.pipeline(transaction=False) as pipe:
                for session_id in ids:
                    pipe.hgetall(meta_key(session_id))
                for session_id, meta in zip(ids, await pipe.execute()):
                    if meta.get("tenant") == tenant:
                        found.append(session_of(session_id, meta))
                    else:
                        gone.append(session_id)
            if gone:
                await self._client.zrem(key, *gone)
            at += len(ids) - len(gone)
        return found


def meta_key(session_id: str) -> str:
    """See :mod:`chatsvc.sessions.redis_scripts`."""
    return f"chatsvc:{{{session_id}}}:meta"


def session_of(session_id: str, meta: dict[str, str]) -> Session:
    """A session without its messages, from what is under its :func:`meta_key`."""
    return Session(
        id=session_id,
        tenant=meta["tenant"],
        title=meta["title"],
        system=meta["system"],
        created_at=float(meta["created_at"]),
        updated_at=float(meta["updated_at"]),
    )


def _key(tenant: str, kind: Kind) -> str:
    name = "sessions" if kind == "chat" else "responses"
    return f"chatsvc:{{tenant-{hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()}}}:{name}"
