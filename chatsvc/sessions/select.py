"""A session store by its URL."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from chatsvc.errors import ConfigError
from chatsvc.sessions.base import SessionStore
from chatsvc.sessions.memory import MemoryStore
from chatsvc.sessions.quotas import SharedQuotas
from chatsvc.sessions.sqlite import SqliteStore

_REDIS = ("redis", "rediss", "unix")
_FORMS = (
    "memory://, sqlite:///relative/path, sqlite:////absolute/path, redis://host:port/db, rediss://... or unix://path"
)


def open_quotas(url: str, failed: Callable[[], None]) -> SharedQuotas | None:
    """The quotas that the processes of this session store share; None when it has but one. Call ``open()`` before use.

    Args:
        failed: called for every request that could not be judged there.

    Raises: ConfigError.
    """
    if url.partition("://")[0] not in _REDIS:
        return None
    from chatsvc.sessions.redis_quotas import RedisQuotas  # noqa: PLC0415  as below

    return RedisQuotas(url, failed)


def open_store(url: str, ttl: float) -> SessionStore:
    """The store that a URL names; call its ``open()`` before use.

    Args:
        url: ``memory://``; ``sqlite:///relative/path`` or ``sqlite:////absolute/path`` (``~`` is the home folder);
            ``redis://``, ``rediss://`` and ``unix://`` as redis-py reads them. Never repeated in messages, since it may
            hold a password.
        ttl: seconds that a session lives after its last read or write.

    Raises: ConfigError.
    """
    if ttl <= 0:
        raise ConfigError(f"--session-ttl must be more than 0 seconds, not {ttl:g}.")
    scheme, separator, rest = url.partition("://")
    if not separator:
        raise ConfigError(f"--session-store wants a URL: {_FORMS}.")
    if scheme == "memory":
        return MemoryStore(ttl)
    if scheme == "sqlite":
        path = rest.removeprefix("/")
        if not rest.startswith("/") or path in ("", "/", ":memory:"):
            raise ConfigError(
                "--session-store sqlite:// needs a file: sqlite:///relative/path or sqlite:////absolute/path "
                "(memory:// keeps sessions in memory)."
            )
        return SqliteStore(Path(path).expanduser(), ttl)
    if scheme in _REDIS:
        from chatsvc.sessions.redis import RedisStore  # noqa: PLC0415  its client is a twentieth of a start

        return RedisStore(url, ttl)
    raise ConfigError(f"--session-store does not know {scheme}://; it takes {_FORMS}.")
