"""The KV pool as people look at it: a snapshot, and its changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from chatsvc.scheduler.request import Sequence
from chatsvc.scheduler.scheduler import Scheduler

MIN_INTERVAL = 0.1


class KVView:
    def __init__(self, scheduler: Scheduler, name_of: Callable[[Sequence], str]) -> None:
        self._scheduler = scheduler
        self._name_of = name_of
        self._changed = asyncio.Event()
        self._closed = False

    def changed(self) -> None:
        self._changed.set()

    def close(self) -> None:
        """The engine has stopped: the events end after what is still new."""
        self._closed = True
        self._changed.set()

    def snapshot(self) -> dict[str, Any]:
        blocks, sequences = self._collect()
        return {
            "block_size": self._scheduler.manager.block_size,
            "blocks": list(blocks.values()),
            "sequences": list(sequences.values()),
        }

    def _collect(self) -> tuple[dict[int, dict[str, Any]], dict[str, dict[str, Any]]]:
        owners: dict[int, list[str]] = {}
        sequences: dict[str, dict[str, Any]] = {}
        for seq in self._scheduler.sequences():
            name = self._name_of(seq)
            table = list(seq.table.ids)
            sequences[name] = {"id": name, "block_table": table, "computed": seq.num_computed, "total": len(seq.tokens)}
            for block_id in table:
                owners.setdefault(block_id, []).append(name)
        blocks = {}
        for block in self._scheduler.manager.pool.blocks[1:]:
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

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """``{"type": "snapshot", ...}`` once, then ``{"type": "change", "blocks", "sequences", "gone"}``."""
        blocks, sequences = self._collect()
        yield {"type": "snapshot", **self.snapshot()}
        while True:
            await self._changed.wait()
            self._changed.clear()
            now_blocks, now_sequences = self._collect()
            change = {
                "type": "change",
                "blocks": [b for i, b in now_blocks.items() if blocks[i] != b],
                "sequences": [s for i, s in now_sequences.items() if sequences.get(i) != s],
                "gone": [i for i in sequences if i not in now_sequences],
            }
            blocks, sequences = now_blocks, now_sequences
            if change["blocks"] or change["sequences"] or change["gone"]:
                yield change
            if self._closed:
                return
            await asyncio.sleep(MIN_INTERVAL)
