"""Connections to Redis from a URL, and what can be said of those that will never be made.

TLS is in the URL, as redis-py reads it: ``rediss://user:password@host:6379/0?ssl_ca_certs=ca.pem``, and for a client
certificate ``&ssl_certfile=client.pem&ssl_keyfile=client.key``. The files are read here, at the start, so that a wrong
path is an error of the configuration and not of the network.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

import redis.asyncio as aioredis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from chatsvc.errors import ConfigError

CONNECT_TIMEOUT = 1.0

AWAY = (RedisConnectionError, RedisTimeoutError, OSError, asyncio.TimeoutError)
"""What says that the server is not there."""

Pool = TypeVar("Pool", bound=aioredis.ConnectionPool)


def pool_of(kind: type[Pool], url: str, **settings: Any) -> Pool:
    """A pool of that kind. The URL is never repeated in messages, since it may hold a password.

    Raises: ConfigError: the URL cannot be read, or a file that it names.
    """
    try:
        _check_path(url)
        pool = kind.from_url(
            url,
            socket_connect_timeout=CONNECT_TIMEOUT,
            decode_responses=True,
            protocol=2,
            client_name="chatsvc",
            **settings,
        )
        _read_files(pool.connection_kwargs)
        pool.connection_class(**pool.connection_kwargs)  # an option that there is not
    except (ValueError, TypeError, RedisError) as error:
        raise ConfigError(f"--session-store holds a Redis URL that cannot be read{_option(url, error)}.") from None
    return pool


def why_never(error: BaseException | None, settings: dict[str, Any]) -> str | None:
    """Why nothing but another configuration helps against this error; None: it may pass by itself.

    Args:
        settings: ``connection_kwargs`` of the pool.
    """
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            trusted = settings.get("ssl_ca_certs")
            by = f"ssl_ca_certs={trusted}" if trusted else "the system's certificates (no ssl_ca_certs is given)"
            return f"the certificate of the Redis server is not good by {by}: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
            own = settings.get("ssl_certfile")
            shown = f"ssl_certfile={own}" if own else "no client certificate (no ssl_certfile is given)"
            return f"the Redis server refuses TLS with {shown}: {error.reason}"
        if isinstance(error, AuthenticationError) or str(error).startswith("WRONGPASS"):
            return f"the Redis server refuses the user or the password of the URL: {error}"
        if isinstance(error, ResponseError) and re.search("DB index|SELECT is not allowed", str(error), re.IGNORECASE):
            return f"the Redis server has no database {settings.get('db')}: {error}"
        error = error.__cause__ or error.__context__
    return None


def _check_path(url: str) -> None:
    """redis-py takes what is no number for database 0, and leaves out the host of a socket's URL.

    Raises: ConfigError, which does not repeat the path: after a ``/`` in a password it is a part of that. ValueError.
    """
    parsed = urlparse(url)
    path = unquote(parsed.path)
    if parsed.scheme == "unix":
        if parsed.hostname or path in ("", "/"):
            raise ConfigError(
                "--session-store: unix:// needs the absolute path of a socket: unix:///run/redis.sock?db=0."
            )
    elif re.fullmatch("/?|/[0-9]+", path) is None:
        raise ConfigError(
            "--session-store: after the host of a Redis URL comes the number of a database and nothing else:"
            " redis://host:6379/0 (a / in a password is written %2F)."
        )


def _option(url: str, error: Exception) -> str:
    """Which option is wrong; "" when none is, or when what looks like one may be a part of a password with ``?``."""
    named = re.search(r"(?:argument|Invalid value for) '(\w+)'", str(error))
    options = url.partition("?")[2]
    if named is None or "@" in options or f"{named[1]}=" not in options:
        return ""
    return f": there is no option {named[1]}" if isinstance(error, TypeError) else f": its option {named[1]} is wrong"


def _read_files(settings: dict[str, Any]) -> None:
    """Raises: ConfigError that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    name, path = "ssl_ca_certs", settings.get("ssl_ca_certs")
    try:
        if path:
            context.load_verify_locations(path)
        name, path = "ssl_certfile", settings.get("ssl_certfile")
        if path:
            if key := settings.get("ssl_keyfile"):
                open(key, "rb").close()  # else the message would not say which of the two is missing
            context.load_cert_chain(path, settings.get("ssl_keyfile"), settings.get("ssl_password") or "")
    except ssl.SSLError as e:
        raise ConfigError(f"--session-store: {name}={path} cannot be used: {e.reason or 'not a certificate'}") from None
    except OSError as e:
        raise ConfigError(f"--session-store: {name}={e.filename or path}: {e.strerror}") from None
