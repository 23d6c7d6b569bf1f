"""The KV pool as people look at it: a snapshot, and its changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, TypeVar

from chatsvc.scheduler.request import Sequence, State
from chatsvc.scheduler.scheduler import Scheduler

K = TypeVar("K")
_Rows = dict[K, dict[str, Any]]

MIN_INTERVAL = 0.1  # seconds between two looks at the pool ...
REST = 20  # ... and at least so many times as long as one look took: a large pool is looked at less often


def snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """``{"block_size", "blocks": [{id, state, ref_count, hits, hash, owners}], "sequences": [{id, block_table,
    computed, total}]}``."""
    return _as_snapshot(scheduler, *_collect(scheduler))


def _as_snapshot(scheduler: Scheduler, blocks: _Rows[int], sequences: _Rows[str]) -> dict[str, Any]:
    return {
        "block_size": scheduler.manager.block_size,
        "blocks": list(blocks.values()),
        "sequences": list(sequences.values()),
    }


def _name_of(seq: Sequence) -> str:
    assert seq.state is not State.FINISHED
    beam = f"beam{seq.seq_id}" if seq.group is not None else str(seq.choice)
    return f"{seq.request.request_id}:{beam}"


def _collect(scheduler: Scheduler) -> tuple[_Rows[int], _Rows[str]]:
    owners: dict[int, list[str]] = {}
    sequences: dict[str, dict[str, Any]] = {}
    for seq in scheduler.sequences():
        name = _name_of(seq)
        table = list(seq.table.ids)
        sequences[name] = {"id": name, "block_table": table, "computed": seq.num_computed, "total": len(seq.tokens)}
        for block_id in table:
            owners.setdefault(block_id, []).append(name)
    blocks = {}
    for block in scheduler.manager.pool.blocks[1:]:
        state = "used" if block.ref_count else "cached" if block.content else "free"
        blocks[block.id] = {
            "id": block.id,
            "state": state,
            "ref_count": block.ref_count,
            "hits": block.hits,
            "hash": block.content.digest.hex() if block.content else None,
            "owners": owners.get(block.id, []),
        }
    return blocks, sequences


class KVView:
    """One who watches."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._changed = asyncio.Event()
        self._closed = False

    def changed(self) -> None:
        self._changed.set()

    def close(self) -> None:
        """The engine has stopped: the events end after what is still new."""
        self._closed = True
        self._changed.set()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """``{"type": "snapshot", ...}`` once, then ``{"type": "change", "blocks", "sequences", "gone"}``."""
        blocks, sequences = _collect(self._scheduler)
        yield {"type": "snapshot", **_as_snapshot(self._scheduler, blocks, sequences)}
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = time.perf_counter()
            now_blocks, now_sequences = _collect(self._scheduler)
            change = {
                "type": "change",
                "blocks": [b for i, b in now_blocks.items() if blocks[i] != b],
                "sequences": [s for i, s in now_sequences.items() if sequences.get(i) != s],
                "gone": [i for i in sequences if i not in now_sequences],
            }
            blocks, sequences = now_blocks, now_sequences
            took = time.perf_counter() - began
            if change["blocks"] or change["sequences"] or change["gone"]:
                yield change
            if self._closed:
                return
            await asyncio.sleep(max(MIN_INTERVAL, REST * took))


class KVViews:
    """All who watch one engine."""

    def __init__(self) -> None:
        self._open: set[KVView] = set()

    def __len__(self) -> int:
        return len(self._open)

    def changed(self) -> None:
        for view in self._open:
            view.changed()

    def close(self) -> None:
        for view in self._open:
            view.close()
        self._open.clear()

    async def events(self, scheduler: Scheduler) -> AsyncIterator[dict[str, Any]]:
        """As :meth:`KVView.events`, told of changes until the reader leaves."""
        view = KVView(scheduler)
        self._open.add(view)
        try:
            async with aclosing(view.events()) as events:
                async for event in events:
                    yield event
        finally:
            self._open.discard(view)
