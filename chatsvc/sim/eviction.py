"""Orders of eviction to compare with the pool's own (least recently used), as lists that a pool can be given.

::

    lru        the pool's own list
    segmented  blocks that were used once go first, whatever their age; used again: protected, LRU among themselves,
               at most PROTECTED of the pool (Karedla, Love and Wherry 1994)
    frequency  least used first; a block's count starts at the count of the last one evicted, so that old fame fades
               (LFU with dynamic ageing, Arlitt et al. 2000)

A use is one time that the last table which names a block lets go of it. Within equals, a sequence's tail goes before
its head, because it was given back first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal

from chatsvc.cache.block import Block, BlockList
from chatsvc.cache.pool import BlockPool

Order = Literal["lru", "segmented", "frequency"]
ORDERS: tuple[Order, ...] = ("lru", "segmented", "frequency")
PROTECTED = 0.8


class _Counted(BlockList):
    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def _used(self, block: Block) -> int:
        assert block.content is not None
        uses = self._uses.get(block.content.content_id, 0) + 1
        self._uses[block.content.content_id] = uses
        return uses

    def _forget(self, block: Block) -> None:
        assert block.content is not None
        self._uses.pop(block.content.content_id, None)


class SegmentedList(_Counted):
    def __init__(self, pool_blocks: int) -> None:
        super().__init__()
        self._protected = BlockList()
        self._is_protected: set[int] = set()
        self._room = int(pool_blocks * PROTECTED)

    def __len__(self) -> int:
        return super().__len__() + len(self._protected)

    def __iter__(self) -> Iterator[Block]:
        yield from super().__iter__()
        yield from self._protected

    def append(self, block: Block) -> None:
        if self._used(block) == 1:
            super().append(block)
            return
        self._protected.append(block)
        self._is_protected.add(block.id)
        if len(self._protected) > self._room:
            demoted = self._protected.pop()
            self._is_protected.remove(demoted.id)
            super().append(demoted)

    def remove(self, block: Block) -> None:
        if block.id in self._is_protected:
            self._is_protected.remove(block.id)
            self._protected.remove(block)
        else:
            super().remove(block)

    def pop(self) -> Block:
        if super().__len__():
            block = super().pop()
        else:
            block = self._protected.pop()
            self._is_protected.remove(block.id)
        self._forget(block)
        return block


class FrequencyList(_Counted):
    """A heap with lazy deletion: O(log n)."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, int, Block]] = []
        self._entry: dict[int, int] = {}  # block id -> serial number of its valid heap entry
        self._age: dict[int, int] = {}  # content id -> the clock when it came in
        self._clock = 0
        self._serial = 0

    def append(self, block: Block) -> None:
        super().append(block)
        assert block.content is not None
        self._serial += 1
        priority = self._age.setdefault(block.content.content_id, self._clock) + self._used(block)
        self._entry[block.id] = self._serial
        heapq.heappush(self._heap, (priority, self._serial, block))

    def remove(self, block: Block) -> None:
        super().remove(block)
        self._entry.pop(block.id, None)

    def pop(self) -> Block:
        while True:
            priority, serial, block = heapq.heappop(self._heap)
            if self._entry.get(block.id) == serial:
                break
        self._clock = priority
        assert block.content is not None
        self._age.pop(block.content.content_id)
        self.remove(block)
        self._forget(block)
        return block


def use_order(pool: BlockPool, order: Order) -> None:
    """Give a fresh pool another order of eviction."""
    assert not pool.num_cached
    if order == "segmented":
        pool._cached = SegmentedList(pool.num_blocks)
    elif order == "frequency":
        pool._cached = FrequencyList()
