"""The file in which KV blocks survive a restart.

::

    magic | u32 length | header (JSON) | xxh3-128 of everything so far = the seal
    record 0:  u32 index, u32 parent + 1, u32 length of extra | xxh3-128 | tokens, extra, KV | xxh3-128
    record 1:  ...

Both sums of a record cover its head, the second its contents too, and both begin with the seal, which holds a random
number: a record that is believed was written for this very file. A header that is not the one expected makes the file
a foreign one; a damaged head ends the reading; damaged contents cost the record and those after it in its chain. xxh3
finds accidents, it does not stop forgers: whoever may write to the directory is trusted, so a file that is somebody
else's is not read.

Parents stand before their children. ``extra`` (tenant, salt) is part of a block's identity as it is in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

MAGIC = b"chatsvKV"
FORMAT = 1
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<III")
_SUM = 16
_MAX_HEADER = 65_536


class NotBelieved(Exception):
    """The file, or what comes now in it, is not ours, not whole or not for this model."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What the bytes of a block depend on; files of another identity are foreign.

    Attributes:
        model: fingerprint of weights and configuration.
        version: of chatsvc: its arithmetic may have changed.
        layout: dtype, shape and kernels, as the executor says it.
        block_size, block_bytes: tokens and KV bytes of a block.
    """

    model: str
    version: str
    layout: str
    block_size: int
    block_bytes: int

    @property
    def file_name(self) -> str:
        """Without the version: a newer chatsvc replaces the file of the older one."""
        key = json.dumps([self.model, self.layout, self.block_size, self.block_bytes])
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest() + ".kv"

    def record_bytes(self, extra: bytes) -> int:
        return _HEAD.size + 2 * _SUM + self.block_size * 4 + len(extra) + self.block_bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A block: its place in the file, its parent's (-1: none), its identity and its KV."""

    index: int
    parent: int
    tokens: bytes
    extra: bytes
    kv: bytes | memoryview


def _sum(*parts: bytes | memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.digest()


class DiskWriter:
    """Writes beside the file and renames at the end: a reader, and a crash, see the old file or the whole new one.

    Raises: OSError from everything.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._target = folder / identity.file_name
        self._temporary = folder / f"{identity.file_name}.{secrets.token_hex(8)}.tmp"
        descriptor = os.open(self._temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # says to `sweep` that somebody is at it
        header = json.dumps({"format": FORMAT, **asdict(identity), "nonce": secrets.token_hex(16)}).encode()
        start = MAGIC + _LENGTH.pack(len(header)) + header
        self._seal = _sum(start)
        self.count = 0
        self._write(start + self._seal)

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]

    def add(self, records: Iterable[Record]) -> None:
        for r in records:
            assert r.index == self.count and r.parent < r.index
            head = _HEAD.pack(r.index, r.parent + 1, len(r.extra))
            identity = head + _sum(self._seal, head) + r.tokens + r.extra
            self._write(identity)
            self._write(r.kv)
            self._write(_sum(self._seal, head, r.tokens, r.extra, r.kv))
            self.count += 1

    def commit(self) -> None:
        os.fsync(self._file.fileno())
        os.replace(self._temporary, self._target)
        self._file.close()
        folder = os.open(self._target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def abort(self) -> None:
        """Leave nothing behind. After ``commit`` it does nothing."""
        if not self._file.closed:
            with suppress(OSError):
                os.unlink(self._temporary)
            self._file.close()


class DiskReader:
    """Reads what can be believed.

    Attributes:
        damaged: records that were skipped: themselves or a block before them in their chain.
        stopped: why reading ended before the end of the file, or "".

    Raises: NotBelieved, FileNotFoundError, OSError on opening.
    """

    def __init__(self, folder: Path, identity: Identity) -> None:
        self._identity = identity
        self._file: BinaryIO = (folder / identity.file_name).open("rb")
        try:
            self._seal = self._header()
        except BaseException:
            self._file.close()
            raise
        self._next = 0
        self._good: set[int] = set()
        self.damaged = 0
        self.stopped = ""

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise NotBelieved("it is shorter than it should be")
        return data

    def _header(self) -> bytes:
        if os.fstat(self._file.fileno()).st_uid != os.geteuid():
            raise NotBelieved("it belongs to another user")
        start = self._exactly(len(MAGIC) + _LENGTH.size)
        (length,) = _LENGTH.unpack_from(start, len(MAGIC))
        if not start.startswith(MAGIC) or length > _MAX_HEADER:
            raise NotBelieved("it is no file of chatsvc's")
        start += self._exactly(length)
        seal = self._exactly(_SUM)
        if seal != _sum(start):
            raise NotBelieved("its header is damaged")
        header = json.loads(start[len(MAGIC) + _LENGTH.size :])
        header.pop("nonce", None)
        if header != {"format": FORMAT, **asdict(self._identity)}:
            raise NotBelieved("it was written for another model, layout or version")
        return seal

    def read(self, max_bytes: int, max_records: int) -> list[Record]:
        """The next good records, about ``max_bytes`` of them; empty at the end."""
        out: list[Record] = []
        size = 0
        while size < max_bytes and len(out) < max_records and not self.stopped:
            try:
                record = self._record()
            except NotBelieved as e:
                self.stopped = str(e)
                break
            if record is None:
                break
            self._next += 1
            if isinstance(record, Record):
                self._good.add(record.index)
                out.append(record)
            else:
                self.damaged += 1
            size += self._identity.block_bytes
        return out

    def _record(self) -> Record | bool | None:
        """None at the end of the file, False for what is not to be believed although the next one may be."""
        start = self._file.read(_HEAD.size + _SUM)
        if not start:
            return None
        head = start[: _HEAD.size]
        if len(start) < _HEAD.size + _SUM:
            raise NotBelieved("it is shorter than it should be")
        if start[_HEAD.size :] != _sum(self._seal, head):
            raise NotBelieved("a record's head is damaged")
        index, parent, extra_length = _HEAD.unpack(head)
        if index != self._next or parent > index:
            raise NotBelieved("its records are out of order")
        contents = [self._exactly(n) for n in (self._identity.block_size * 4, extra_length, self._identity.block_bytes)]
        good = self._exactly(_SUM) == _sum(self._seal, head, *contents)
        if not good or (parent and parent - 1 not in self._good):
            return False
        return Record(index, parent - 1, *contents)

    def close(self) -> None:
        self._file.close()


def sweep(folder: Path) -> None:
    """Remove what writers that were killed left behind; one that still writes holds a lock."""
    for path in folder.glob("*.kv.*.tmp"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
