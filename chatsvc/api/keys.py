"""API keys: the file they are described in, and who a presented key is.

The file is TOML. It holds no key, only digests, so reading it opens nothing::

    [[key]]
    name = "ann"                    # for logs and error messages; unique
    sha256 = "9f86d081884c7d65..."  # of the whole key
    tenant = "team-a"               # optional; keys of a tenant share sessions and cached prefixes
    allow = ["chat"]                # optional; what it may do, see AREAS; without it: everything
    requests_per_minute = 60        # optional, as the two below; without one: no such limit
    tokens_per_minute = 20000
    max_concurrent = 4

A plain SHA-256 is enough because keys are random (``chatsvc key new`` draws 256 bits): there is no list of likely keys
to try, as there is for passwords. Nothing here puts a key, or a value of the file, into a message.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
import secrets
import tomllib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from chatsvc.errors import ConfigError
from chatsvc.sessions.quotas import Limits

log = logging.getLogger("chatsvc.api")

Area = Literal["chat", "metrics", "debug"]
AREAS: tuple[Area, ...] = get_args(Area)
MAX_KEYS = 1024  # comparing with all of them takes a third of a millisecond
PREFIX = "sk-chatsvc-"
WATCH_SECONDS = 2.0

Count = Annotated[int, Field(ge=1, le=10**12)]


class KeyEntry(BaseModel):
    """One ``[[key]]`` of the file."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,64}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    # "" is the tenant of the time without keys: such a key sees the sessions of that time.
    tenant: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{0,64}$")] | None = None
    allow: Annotated[list[Area], Field(min_length=1)] | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_concurrent: Count | None = None


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    key: Annotated[list[KeyEntry], Field(min_length=1, max_length=MAX_KEYS)]


@dataclass(frozen=True, slots=True)
class Key:
    """Who a request comes from.

    Attributes:
        id: the key's own name for counting its quotas; it outlives a reload of the file.
        tenant: whose sessions and cached prefixes it sees. A key without one in the file is a tenant of its own; the
            colon keeps those apart from names in the file.
    """

    name: str
    digest: bytes = field(repr=False)
    tenant: str
    allow: frozenset[Area]
    limits: Limits

    @property
    def id(self) -> str:
        return self.digest.hex()

    @property
    def unlimited(self) -> bool:
        """It may do everything."""
        return self.allow == frozenset(AREAS)

    @classmethod
    def of(cls, entry: KeyEntry) -> Key:
        tenant = f"key:{entry.sha256[:32]}" if entry.tenant is None else entry.tenant
        limits = Limits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent)
        return cls(entry.name, bytes.fromhex(entry.sha256), tenant, frozenset(entry.allow or AREAS), limits)


class KeySet:
    """The keys of one reading of the file."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self.keys = keys

    def find(self, presented: bytes) -> Key | None:
        """The key with these bytes. Takes the same time whichever it is, and whether it is any."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def parse_entry(values: dict[str, object]) -> KeyEntry:
    """One entry from its fields. Raises: ConfigError."""
    try:
        return _File.model_validate({"key": [values]}).key[0]
    except ValidationError as e:
        raise ConfigError(_complaint(e).removeprefix("key 1: ")) from None


def parse_keys(text: str) -> KeySet:
    """Raises: ConfigError that names the entry and the field, never their values."""
    try:
        entries = _File.model_validate(tomllib.loads(text)).key
    except tomllib.TOMLDecodeError as e:
        line = re.search(r"at line \d+", str(e))  # no more of its words: they may quote the file
        raise ConfigError(f"not valid TOML{f' ({line[0]})' if line else ''}") from None
    except ValidationError as e:
        raise ConfigError(_complaint(e)) from None
    for names in ([e.name for e in entries], [e.sha256 for e in entries]):
        seen: set[str] = set()
        for i, value in enumerate(names):
            if value in seen:
                raise ConfigError(f"key {i + 1} ({entries[i].name}): its name or its key stands there twice")
            seen.add(value)
    return KeySet(tuple(Key.of(e) for e in entries))


_HINTS = {
    "sha256": "64 small hexadecimal digits, the SHA-256 of the key",
    "name": "1 to 64 of A-Z a-z 0-9 . _ @ -",
    "tenant": "up to 64 of A-Z a-z 0-9 . _ @ -",
    "allow": f"a list with some of {', '.join(AREAS)}",
}


def _complaint(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_input=False)
    if any(e["loc"][0] != "key" for e in errors):
        return "there may be nothing but [[key]] entries"
    first = errors[0]
    where = first["loc"]
    if len(where) < 3:
        return f"from 1 to {MAX_KEYS} [[key]] entries"
    entry, name = f"key {int(where[1]) + 1}", str(where[2])
    if first["type"] == "extra_forbidden":
        known = ", ".join(KeyEntry.model_fields)
        return f"{entry}: there is an unknown field; known are {known}"  # a field's name may be a pasted key
    if first["type"] == "missing":
        return f"{entry}: {name} is missing"
    return f"{entry}: {name} has to be {_HINTS.get(name, 'a whole number from 1')}"


def read_keys(path: Path) -> KeySet:
    """Raises: ConfigError that names the file."""
    try:
        return parse_keys(path.read_text("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path}: not UTF-8 text") from None
    except OSError as e:
        raise ConfigError(f"--api-key-file {path}: {e.strerror}") from None
    except ConfigError as e:
        raise ConfigError(f"--api-key-file {path}: {e}") from None


class KeyFile:
    """The keys that count now. Later readings happen in a thread, and one of a broken file changes nothing but the log.

    A request is judged by the keys of the moment it arrives; what runs goes on.
    """

    def __init__(self, path: Path) -> None:
        """Raises: ConfigError."""
        self._path = path
        self._nudged = asyncio.Event()
        self._seen = self._stamp()
        self.current = read_keys(path)

    def nudge(self) -> None:
        """Read the file again, changed or not (SIGHUP)."""
        self._nudged.set()

    async def watch(self, seconds: float = WATCH_SECONDS) -> None:
        """Read the file again whenever it has changed. For ever; looks every so many ``seconds``."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._nudged.wait()
            if self._nudged.is_set() or await asyncio.to_thread(self._stamp) != self._seen:
                self._nudged.clear()
                await self._reload()

    async def _reload(self) -> None:
        self._seen = await asyncio.to_thread(self._stamp)  # before: what changes meanwhile is seen the next time
        try:
            self.current = await asyncio.to_thread(read_keys, self._path)
        except ConfigError as e:
            log.error("%s. The keys from before are kept", e)
        else:
            log.info("API keys: %d, read again", len(self.current.keys))

    def _stamp(self) -> tuple[int, ...]:
        """Differs when the file does; a link (as of a mounted secret) is followed."""
        try:
            found = os.stat(self._path)
        except OSError:
            return ()
        return found.st_mtime_ns, found.st_size, found.st_ino


def new_key() -> tuple[str, str]:
    """(key, its sha256 in hexadecimal digits): 256 random bits."""
    key = PREFIX + secrets.token_urlsafe(32)
    return key, hashlib.sha256(key.encode()).hexdigest()
