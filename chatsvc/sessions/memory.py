"""Sessions in this process: gone at its end. For tests and for services that want no memory of their users."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chatsvc.errors import Conflict, NotFound
from chatsvc.sessions.base import Kind, Message, Session, TurnOver
from chatsvc.sessions.codec import check_one_running, check_room, decode, encode, kind_of, stored_size


@dataclass(slots=True)
class _Record:
    """A session and its messages by id, encoded: what a caller holds never shares objects with the store."""

    meta: Session
    expires_at: float
    messages: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(stored_size(m) for m in self.messages.values())


class MemoryStore:
    """Args:
    ttl: seconds of life after the last read or write.
    clock: Unix time in seconds.
    """

    def __init__(self, ttl: float, clock: Callable[[], float] = time.time) -> None:
        self._ttl = ttl
        self._clock = clock
        self._records: dict[str, _Record] = {}
        self._next_sweep = 0.0

    @property
    def relay(self) -> None:
        """Nobody shares this store."""

    async def open(self) -> None:
        return None

    async def close(self) -> None:
        return None

    async def ping(self) -> None:
        return None

    async def create(self, session: Session) -> None:
        self._sweep()
        if session.id in self._records:
            raise Conflict("There is already a session with this id.")
        record = _Record(replace(session, messages=[]), self._clock() + self._ttl)
        self._add(record, session.messages)
        self._records[session.id] = record

    async def get(self, tenant: str, session_id: str) -> Session | None:
        record = self._find(tenant, session_id)
        return None if record is None else self._session(record)

    async def list(self, tenant: str, limit: int = 50, kind: Kind | None = None) -> list[Session]:
        now = self._clock()
        alive = [r.meta for r in self._records.values() if r.meta.tenant == tenant and r.expires_at > now]
        alive = [s for s in alive if kind in (None, kind_of(s.id))]
        alive.sort(key=lambda s: (s.updated_at, s.id), reverse=True)
        return [replace(s, messages=[]) for s in alive[:limit]]

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None:
        record = self._find(tenant, session_id)
        if record is None:
            return None
        meta = record.meta
        if title is not None or system is not None:
            meta.title = meta.title if title is None else title
            meta.system = meta.system if system is None else system
            meta.updated_at = self._clock()
        return self._session(record)

    async def delete(self, tenant: str, session_id: str) -> bool:
        if self._find(tenant, session_id) is None:
            return False
        del self._records[session_id]
        return True

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        record = self._require(tenant, session_id)
        self._add(record, messages)
        record.meta.updated_at = self._clock()

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        record = self._require(tenant, session_id)
        stored = record.messages.get(message.id)
        if stored is None:
            raise NotFound("There is no such message.")
        fresh = encode(message)
        if stored != fresh and decode(stored).status != "running":
            raise TurnOver
        record.messages[message.id] = fresh
        record.meta.updated_at = self._clock()

    async def rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        record = self._require(tenant, session_id)
        if any(m.id not in record.messages for m in messages):
            raise NotFound("There is no such message.")
        record.messages |= {m.id: encode(m) for m in messages}

    async def interrupt_running(self) -> int:
        count = 0
        for record in self._records.values():
            for key, text in record.messages.items():
                message = decode(text)
                if message.status == "running":
                    record.messages[key] = encode(replace(message, status="interrupted"))
                    count += 1
        return count

    @staticmethod
    def _add(record: _Record, messages: Sequence[Message]) -> None:
        new = [m for m in messages if m.id not in record.messages]
        if any(m.status == "running" for m in new):
            known = map(decode, record.messages.values())
            check_one_running(next((m.id for m in known if m.status == "running"), None), new)
        fresh = {m.id: encode(m) for m in new}
        check_room(len(record.messages) + len(fresh), record.size + sum(stored_size(m) for m in fresh.values()))
        record.messages.update(fresh)

    @staticmethod
    def _session(record: _Record) -> Session:
        return replace(record.meta, messages=[decode(m) for m in record.messages.values()])

    def _find(self, tenant: str, session_id: str) -> _Record | None:
        record, now = self._records.get(session_id), self._clock()
        if record is None or record.meta.tenant != tenant:
            return None
        if record.expires_at <= now:
            del self._records[session_id]
            return None
        record.expires_at = now + self._ttl
        return record

    def _require(self, tenant: str, session_id: str) -> _Record:
        record = self._find(tenant, session_id)
        if record is None:
            raise NotFound("There is no such session.")
        return record

    def _sweep(self) -> None:
        """Drops expired sessions now and then, so that memory follows the living ones."""
        now = self._clock()
        if now >= self._next_sweep:
            self._next_sweep = now + self._ttl / 10
            self._records = {k: r for k, r in self._records.items() if r.expires_at > now}
