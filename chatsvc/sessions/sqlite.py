"""Sessions in one SQLite file: the default. They survive the process, also when it is killed.

One thread owns the connection and runs whole transactions, so every operation is atomic, costs the event loop one hop,
and cannot be interrupted half way. (An async wrapper would hop once per statement and leave transactions open to
cancellation.) Write-ahead log with ``synchronous=NORMAL``: a killed process loses nothing, a power cut may lose the
last turns but never corrupts. One file belongs to one server process: it holds a lock on ``<file>.lock``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from chatsvc.errors import ConfigError, Conflict, NotFound, StoreError
from chatsvc.sessions.base import Kind, Message, Session, TurnOver
from chatsvc.sessions.codec import check_one_running, check_room, decode, encode, kind_of, stored_size
from chatsvc.sessions.guard import Guard

P = ParamSpec("P")
T = TypeVar("T")
Sessions = list[Session]

BUSY_TIMEOUT = 2.0
DEADLINE = 5.0
SCHEMA_VERSION = 1
CHECKED_SIZE = 2**30  # bytes; a larger file would be read for too long at the start

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, title TEXT NOT NULL, system TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, expires_at REAL NOT NULL,
    messages INTEGER NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS sessions_by_tenant ON sessions (tenant, updated_at DESC);
CREATE INDEX IF NOT EXISTS sessions_by_expiry ON sessions (expires_at);
CREATE TABLE IF NOT EXISTS messages (
    session_id TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE, seq INTEGER NOT NULL, id TEXT NOT NULL,
    status TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (session_id, seq), UNIQUE (session_id, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS messages_running ON messages (status) WHERE status = 'running';
"""


def check_folder(path: Path) -> None:
    """Raises: ConfigError. A folder is not made: it is more often a slip of the pen, or a disk that is not there."""
    if not path.parent.is_dir():
        raise ConfigError(f"--session-store: the folder {path.parent} is not there; make it, or choose another file")


class SqliteStore:
    """Args:
    path: the file; its folder has to be there.
    ttl: seconds of life after the last read or write.
    clock: Unix time in seconds.
    """

    def __init__(self, path: Path, ttl: float, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._ttl = ttl
        self._clock = clock
        self._guard = Guard("SQLite", DEADLINE, (sqlite3.Error, OSError))
        self._thread: ThreadPoolExecutor | None = None
        self._db: sqlite3.Connection | None = None
        self._lock_fd: int | None = None
        self._next_sweep = 0.0

    @property
    def relay(self) -> None:
        """The file belongs to one process."""

    async def open(self) -> None:
        """Raises: ConfigError when another process has the file, or when it is damaged or cannot be opened."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._open)
        except BaseException:
            thread.shutdown(wait=False)
            raise
        self._thread = thread

    async def close(self) -> None:
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        await self._guard.drain()
        try:
            await asyncio.get_running_loop().run_in_executor(thread, self._close)
        finally:
            thread.shutdown(wait=False)

    async def ping(self) -> None:
        await self._run(self._ping)

    async def create(self, session: Session) -> None:
        await self._run(self._create, session)

    async def get(self, tenant: str, session_id: str) -> Session | None:
        return await self._run(self._get, tenant, session_id)

    async def list(self, tenant: str, limit: int = 50, kind: Kind | None = None) -> list[Session]:
        return await self._run(self._list, tenant, limit, kind)

    async def patch(self, tenant: str, session_id: str, *, title: str | None, system: str | None) -> Session | None:
        return await self._run(self._patch, tenant, session_id, title, system)

    async def delete(self, tenant: str, session_id: str) -> bool:
        return await self._run(self._delete, tenant, session_id)

    async def append(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._run(self._append, tenant, session_id, messages)

    async def update_message(self, tenant: str, session_id: str, message: Message) -> None:
        await self._run(self._update_message, tenant, session_id, message)

    async def rewrite(self, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        await self._run(self._rewrite, tenant, session_id, messages)

    async def interrupt_running(self) -> int:
        return await self._run(self._interrupt_running)

    # What follows runs in the store's thread.

    async def _run(self, call: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._thread is None:
            raise StoreError("The SQLite session store is not open.")
        return await self._guard.run(
            asyncio.get_running_loop().run_in_executor(self._thread, self._transaction, call, args)
        )

    def _transaction(self, call: Callable[..., T], args: tuple[object, ...]) -> T:
        db = self._db
        if db is None:
            raise StoreError("The SQLite session store is not open.")
        db.execute("BEGIN IMMEDIATE")
        try:
            result = call(db, *args)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise
        return result

    def _open(self) -> None:
        try:
            check_folder(self._path)
            self._lock_fd = _lock(self._path)
            db = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT, isolation_level=None, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.execute("PRAGMA foreign_keys=ON")
                db.create_function("kind_of", 1, kind_of, deterministic=True)
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise ConfigError(f"The session file {self._path} was written by a newer chatsvc.")
                self._check_whole(db)
                db.executescript(_SCHEMA)
                db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            except BaseException:
                db.close()
                raise
        except (sqlite3.Error, OSError) as error:
            self._unlock()
            raise ConfigError(f"The session file {self._path} cannot be opened: {error}") from error
        except ConfigError:
            self._unlock()
            raise
        self._db = db

    def _check_whole(self, db: sqlite3.Connection) -> None:
        """A torn file opens like any other, and then no session can be read. Raises: ConfigError, sqlite3.Error."""
        if self._path.stat().st_size > CHECKED_SIZE:
            return
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise ConfigError(
                f"The session file {self._path} is damaged ({found.splitlines()[-1]}); put a backup in its place, "
                "or move it away to begin with an empty one (sqlite3's .recover gets out of it what is whole)."
            )

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        self._unlock()

    def _unlock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _ping(self, db: sqlite3.Connection) -> None:
        db.execute("SELECT 1 FROM sessions LIMIT 1").fetchone()

    def _create(self, db: sqlite3.Connection, session: Session) -> None:
        self._sweep(db)
        try:
            db.execute(
                "INSERT INTO sessions VALUES (?,?,?,?,?,?,?,0,0)",
                (session.id, session.tenant, session.title, session.system, session.created_at, session.updated_at,
                 self._clock() + self._ttl),
            )  # fmt: skip
        except sqlite3.IntegrityError:
            raise Conflict("There is already a session with this id.") from None
        self._insert(db, session.id, session.messages)

    def _get(self, db: sqlite3.Connection, tenant: str, session_id: str) -> Session | None:
        if not self._touch(db, tenant, session_id):
            return None
        row = db.execute(f"SELECT {_COLUMNS} FROM sessions WHERE id=?", (session_id,)).fetchone()
        rows = db.execute("SELECT status, body FROM messages WHERE session_id=? ORDER BY seq", (session_id,))
        session = Session(*row)
        session.messages = [replace(decode(body), status=status) for status, body in rows]
        return session

    def _list(self, db: sqlite3.Connection, tenant: str, limit: int, kind: Kind | None) -> Sessions:
        rows = db.execute(
            f"SELECT {_COLUMNS} FROM sessions WHERE tenant=?1 AND expires_at>?2 "
            "AND (?4 IS NULL OR kind_of(id)=?4) ORDER BY updated_at DESC, id DESC LIMIT ?3",
            (tenant, self._clock(), limit, kind),
        )
        return [Session(*row) for row in rows]

    def _patch(
        self, db: sqlite3.Connection, tenant: str, session_id: str, title: str | None, system: str | None
    ) -> Session | None:
        if not self._touch(db, tenant, session_id):
            return None
        if title is not None or system is not None:
            db.execute(
                "UPDATE sessions SET title=coalesce(?,title), system=coalesce(?,system), updated_at=? WHERE id=?",
                (title, system, self._clock(), session_id),
            )
        return self._get(db, tenant, session_id)

    def _delete(self, db: sqlite3.Connection, tenant: str, session_id: str) -> bool:
        if not self._touch(db, tenant, session_id):
            return False
        return db.execute("DELETE FROM sessions WHERE id=?", (session_id,)).rowcount == 1

    def _append(self, db: sqlite3.Connection, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        self._require(db, tenant, session_id)
        self._insert(db, session_id, messages)
        db.execute("UPDATE sessions SET updated_at=? WHERE id=?", (self._clock(), session_id))

    def _update_message(self, db: sqlite3.Connection, tenant: str, session_id: str, message: Message) -> None:
        self._require(db, tenant, session_id)
        key = (session_id, message.id)
        row = db.execute("SELECT body, status FROM messages WHERE session_id=? AND id=?", key).fetchone()
        if row is None:
            raise NotFound("There is no such message.")
        body = encode(message)
        if row[1] != "running" and row != (body, message.status):
            raise TurnOver
        db.execute("UPDATE messages SET status=?, body=? WHERE session_id=? AND id=?", (message.status, body, *key))
        db.execute(
            "UPDATE sessions SET updated_at=?, size=size+? WHERE id=?",
            (self._clock(), stored_size(body) - stored_size(row[0]), session_id),
        )

    def _rewrite(self, db: sqlite3.Connection, tenant: str, session_id: str, messages: Sequence[Message]) -> None:
        self._require(db, tenant, session_id)
        for message in messages:
            body = encode(message)
            row = db.execute(
                "SELECT body FROM messages WHERE session_id=? AND id=?", (session_id, message.id)
            ).fetchone()
            if row is None:
                raise NotFound("There is no such message.")
            db.execute(
                "UPDATE messages SET status=?, body=? WHERE session_id=? AND id=?",
                (message.status, body, session_id, message.id),
            )
            grown = stored_size(body) - stored_size(row[0])
            db.execute("UPDATE sessions SET size=size+? WHERE id=?", (grown, session_id))

    def _interrupt_running(self, db: sqlite3.Connection) -> int:
        return db.execute("UPDATE messages SET status='interrupted' WHERE status='running'").rowcount

    def _insert(self, db: sqlite3.Connection, session_id: str, messages: Sequence[Message]) -> None:
        count, size = db.execute("SELECT messages, size FROM sessions WHERE id=?", (session_id,)).fetchone()
        if any(m.status == "running" for m in messages):
            row = db.execute(
                "SELECT id FROM messages WHERE session_id=? AND status='running'", (session_id,)
            ).fetchone()
            check_one_running(None if row is None else row[0], messages)
        for message in messages:
            body = encode(message)
            added = db.execute(
                "INSERT OR IGNORE INTO messages VALUES (?,?,?,?,?)",
                (session_id, count, message.id, message.status, body),
            ).rowcount
            count += added
            size += stored_size(body) * added
        check_room(count, size)  # raising rolls the transaction back
        db.execute("UPDATE sessions SET messages=?, size=? WHERE id=?", (count, size, session_id))

    def _touch(self, db: sqlite3.Connection, tenant: str, session_id: str) -> bool:
        """Extends the session's life; False when there is none of this tenant."""
        now = self._clock()
        return (
            db.execute(
                "UPDATE sessions SET expires_at=? WHERE id=? AND tenant=? AND expires_at>?",
                (now + self._ttl, session_id, tenant, now),
            ).rowcount
            == 1
        )

    def _require(self, db: sqlite3.Connection, tenant: str, session_id: str) -> None:
        if not self._touch(db, tenant, session_id):
            raise NotFound("There is no such session.")

    def _sweep(self, db: sqlite3.Connection) -> None:
        """Deletes expired sessions, a bounded number at a time."""
        now = self._clock()
        if now >= self._next_sweep:
            gone = db.execute(
                "DELETE FROM sessions WHERE id IN (SELECT id FROM sessions WHERE expires_at<=? LIMIT 200)", (now,)
            ).rowcount
            self._next_sweep = now if gone == 200 else now + self._ttl / 100


_COLUMNS = "id, tenant, title, system, created_at, updated_at"


def _lock(path: Path) -> int:
    """Takes the exclusive lock beside the file; the kernel drops it with the process, however that ends."""
    fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with _closing_on_error(fd):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"The session file {path} is in use by another chatsvc process. Give this one a file of its own with "
                "--session-store sqlite:///other.db, or let both share a Redis with --session-store redis://host:6379/0."
            ) from None
    return fd


@contextlib.contextmanager
def _closing_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise
