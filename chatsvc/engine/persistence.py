"""Hot prefixes survive a restart: saved to a file now and then and at the end, restored before the first request.

A save looks at the pool in slices, lets a thread choose and write, and reads blocks through the executor a few at a
time, so that neither the loop nor a step waits for it noticeably. What is read is what the pool says at that moment:
a block that was evicted meanwhile is left out, and with it what comes after it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from chatsvc import __version__
from chatsvc.cache.block import Content
from chatsvc.cache.diskfile import DiskReader, DiskWriter, Identity, NotBelieved, Record, sweep
from chatsvc.cache.index import ROOT_ID
from chatsvc.cache.manager import BlockManager
from chatsvc.cache.persist import Adoption, Candidate, Saved, candidates, choose, places
from chatsvc.errors import ConfigError, EngineError
from chatsvc.runtime.executor import Executor, KVCapacity

log = logging.getLogger(__name__)

T = TypeVar("T")

CHUNK_BYTES = 4 * 2**20  # read between two steps: about a millisecond of copying
CHUNK_BLOCKS = 256
BYTES_PER_SECOND = 4 * 2**20  # written on average at most, for the disk's sake: every save writes the file anew
PAUSE = 2.0  # copying and writing take processor time from the steps: a save among requests works a third of the time


@dataclass(frozen=True, slots=True)
class DiskCache:
    """Attributes:
    folder: where the files are; made when it is missing, for this user alone.
    max_bytes: size of this model's file.
    fingerprint: of the model; called once, off the loop.
    interval: seconds between two saves, longer for files over 240 MiB.
    restore_seconds, final_seconds: limits of the restore at the start and of the save at the end.
    """

    folder: Path
    max_bytes: int
    fingerprint: Callable[[], str]
    interval: float = 60.0
    restore_seconds: float = 10.0
    final_seconds: float = 20.0

    def prepare(self) -> None:
        """Raises: ConfigError when the folder cannot be used."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"--disk-cache-dir {self.folder} cannot be made: {e.strerror}") from e
        if not os.access(self.folder, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigError(f"--disk-cache-dir {self.folder} is not readable and writable")


async def _done(future: Future[T]) -> T:
    """The result; an executor that drops the work is an error of its own, not a cancellation of who waits."""
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EngineError("the executor was stopped") from None


class Persistence:
    """One engine's. ``restore``, then ``run``, at last ``stop``; none of them raises because of a file."""

    def __init__(self, config: DiskCache, executor: Executor, manager: BlockManager, capacity: KVCapacity) -> None:
        self._config = config
        self._executor = executor
        self._manager = manager
        self._capacity = capacity
        self._identity: Identity | None = None
        self._saved: frozenset[int] = frozenset()  # content ids in the file
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatsvc-disk")
        self._stopped = False

    async def _off(self, work: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    # -- restore -----------------------------------------------------------------------------------------------

    async def restore(self) -> int:
        """Number of blocks that are findable again. Nothing else may touch the pool meanwhile."""
        began = time.perf_counter()
        adoption = Adoption(self._manager)
        reader: DiskReader | None = None
        try:
            reader = await self._off(self._open)
            while adoption.room and time.perf_counter() - began < self._config.restore_seconds:
                if not await self._restore_some(reader, adoption):
                    break
        except FileNotFoundError:
            pass
        except NotBelieved as e:
            log.warning("the disk cache is ignored: %s", e)
        except Exception as e:
            log.warning("the disk cache is not read on: %s: %s", type(e).__name__, e)
        finally:
            adoption.close()
            if reader is not None:
                reader.close()
        self._saved = adoption.contents
        if reader is not None:
            seconds = time.perf_counter() - began
            log.info("disk cache: %d blocks restored in %.2f s", len(self._saved), seconds)
            if reader.damaged:
                blocks = "1 damaged block is" if reader.damaged == 1 else f"{reader.damaged} damaged blocks are"
                log.warning("disk cache: %s left out", blocks)
            if reader.stopped:
                log.warning("disk cache: the rest of the file is left out, because %s", reader.stopped)
        return len(self._saved)

    def _open(self) -> DiskReader:
        c = self._capacity
        model = self._config.fingerprint()
        self._identity = Identity(model, __version__, c.layout, self._manager.block_size, c.block_bytes)
        sweep(self._config.folder)
        return DiskReader(self._config.folder, self._identity)

    async def _restore_some(self, reader: DiskReader, adoption: Adoption) -> bool:
        room = min(adoption.room, CHUNK_BLOCKS)
        records = await self._off(reader.read, CHUNK_BYTES, room)
        blocks = adoption.reserve(len(records))
        for tier in range(len(self._manager.tiers)):
            mine = [(r, b) for r, (t, b) in zip(records, blocks, strict=True) if t == tier]
            if mine:
                data = b"".join(r.kv for r, _ in mine)
                ids = [b.id for _, b in mine]
                await _done(self._executor.write_blocks(ids, data, host=tier == 1))
        adoption.settle([Saved(r.index, r.parent, r.tokens, r.extra) for r in records], blocks)
        return bool(records)

    # -- save --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Save now and then, until cancelled; a large file less often than a small one."""
        while True:
            size = len(self._saved) * self._capacity.block_bytes
            await asyncio.sleep(max(self._config.interval, size / BYTES_PER_SECOND))
            await self.save()

    async def stop(self, *, save: bool = True) -> None:
        """Save for the last time, within ``final_seconds``, when ``run`` has ended. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        try:
            async with asyncio.timeout(self._config.final_seconds):
                if save:
                    await self.save()
        except TimeoutError:
            log.warning("disk cache: not saved within %g s; what was saved before is kept", self._config.final_seconds)
        finally:
            self._thread.shutdown(wait=False)

    async def save(self) -> int:
        """Number of blocks written; 0 when nothing has changed, or when it did not work."""
        identity = self._identity
        if identity is None:
            return 0
        began = time.perf_counter()
        try:
            found: list[Candidate] = []
            for some in candidates(self._manager):
                found += some
                await asyncio.sleep(0)
            room = self._config.max_bytes - 4096
            chosen = await self._off(choose, found, room, lambda c: identity.record_bytes(c.extra))
            if not chosen or {c.content_id for c in chosen} == self._saved:
                return 0
            writer = await self._off(DiskWriter, self._config.folder, identity)
            try:
                written = await self._write(writer, identity, chosen, 0.0 if self._stopped else PAUSE)
                if not written:
                    return 0
                await self._off(writer.commit)
            finally:
                # On the writer's own thread, which may be writing at this moment if we were cancelled.
                gone = asyncio.wrap_future(self._thread.submit(writer.abort))
                await asyncio.wait([gone], timeout=1)
        except Exception as e:
            log.warning("disk cache: not saved: %s: %s", type(e).__name__, e)
            return 0
        self._saved = frozenset(written)
        log.info("disk cache: %d blocks saved in %.2f s", len(written), time.perf_counter() - began)
        return len(written)

    async def _write(
        self, writer: DiskWriter, identity: Identity, chosen: list[Content], pause: float
    ) -> dict[int, int]:
        """Content ids that are in the file, with their index in it. ``pause``: rest after work, as a share of it."""
        step = max(1, min(CHUNK_BLOCKS, CHUNK_BYTES // max(1, identity.block_bytes)))
        written: dict[int, int] = {}
        for at in range(0, len(chosen), step):
            began = time.perf_counter()
            some = chosen[at : at + step]
            data = await self._read(some, identity.block_bytes)
            records = []
            for content in some:
                parent = written.get(content.parent_id, -1)
                if content.content_id in data and (parent >= 0 or content.parent_id == ROOT_ID):
                    index = written[content.content_id] = len(written)
                    kv = data[content.content_id]
                    records.append(Record(index, parent, content.tokens, content.extra, kv))
            await self._off(writer.add, records)
            await asyncio.sleep(pause * (time.perf_counter() - began))
        return written

    async def _read(self, contents: list[Content], size: int) -> dict[int, memoryview]:
        """KV bytes by content id, without those that are gone."""
        where = places(self._manager, contents)
        reads = []
        for tier in range(len(self._manager.tiers)):
            mine = {c: block for c, (t, block) in where.items() if t == tier}
            if mine:  # submitted before anything else can be: the bytes are of this very moment
                reads.append((list(mine), self._executor.read_blocks(list(mine.values()), host=tier == 1)))
        out: dict[int, memoryview] = {}
        for ids, future in reads:
            data = await _done(future)
            out |= {c: data[i * size : (i + 1) * size] for i, c in enumerate(ids)}
        return out
