"""Cached blocks in order of eviction, with a pin for prefixes that many requests share.

A simulation of multi-turn traffic (``chatsvc simulate --only eviction``) found no order that beats least recently used.
What it cannot know is that a system prompt will be wanted again after a pause: a block that was found by several
requests can therefore be kept for a time after its last use, whatever else comes by meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from chatsvc.cache.block import Block, BlockList

# Found by that many requests a block counts as shared.
SHARED_HITS = 3
# At most that share of the pool is kept from eviction.
ROOM = 0.5


class KeptList(BlockList):
    """Least recently used first, but shared blocks last until ``seconds`` after their last use.

    Args:
        pool_blocks: size of the pool.
        clock: monotonic seconds.
    """

    def __init__(self, pool_blocks: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._kept = BlockList()
        self._until: dict[int, float] = {}  # by block id, in the order of ``_kept``
        self._room = int(pool_blocks * ROOM)
        self._seconds = seconds
        self._clock = clock

    def __len__(self) -> int:
        return super().__len__() + len(self._kept)

    def __iter__(self) -> Iterator[Block]:
        yield from super().__iter__()
        yield from self._kept

    def append(self, block: Block) -> None:
        if block.hits < SHARED_HITS or len(self._kept) >= self._room:
            super().append(block)
            return
        self._kept.append(block)
        self._until[block.id] = self._clock() + self._seconds

    def remove(self, block: Block) -> None:
        if self._until.pop(block.id, None) is None:
            super().remove(block)
        else:
            self._kept.remove(block)

    def pop(self) -> Block:
        now = self._clock()
        first = next(iter(self._kept), None)
        # One that has expired was used longer ago than any that has not: it is the next to go.
        if first is not None and (self._until[first.id] <= now or not super().__len__()):
            self.remove(first)
            return first
        return super().pop()
