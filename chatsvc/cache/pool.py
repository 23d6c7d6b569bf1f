"""The pool of physical blocks: ids, reference counts, who may be evicted. Knows nothing of sequences or tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from chatsvc.cache.block import Block, BlockList, Content
from chatsvc.cache.index import PrefixIndex

MAX_EVENTS = 65_536


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """What became findable or stopped being so. ``lost`` says that older events were dropped unread."""

    kind: Literal["stored", "removed", "lost"]
    block_id: int
    content_id: int = 0
    parent_id: int = 0
    digest: bytes = b""


class BlockPool:
    """Blocks 1..num_blocks; block 0 is the null block, never handed out and not counted.

    ``cached`` holds the cached blocks and says which is evicted next (default: the least recently used).
    """

    def __init__(self, num_blocks: int, index: PrefixIndex, cached: BlockList | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, not {num_blocks}")
        self.num_blocks = num_blocks
        self.index = index
        self.blocks = [Block(i) for i in range(num_blocks + 1)]
        self._blank = BlockList()
        self._cached = BlockList() if cached is None else cached
        for block in self.blocks[1:]:
            self._blank.append(block)
        self.evictions = 0
        self._clock = 0
        self.on_evict: Callable[[Block], None] | None = None
        self._events: deque[CacheEvent] = deque()
        self._events_lost = False

    @property
    def num_available(self) -> int:
        """Blocks that ``take`` can hand out: free and cached ones."""
        return len(self._blank) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def take(self) -> Block:
        """A block with ref_count 1 and no content. Blank ones first, then the least recently used cached one.

        Raises: IndexError when none is available (callers ask ``num_available`` first).
        """
        if len(self._blank):
            block = self._blank.pop()
        else:
            block = self._cached.pop()
            self.evictions += 1
            if self.on_evict is not None:
                self.on_evict(block)
            self._forget(block)
        block.ref_count = 1
        return block

    def ref(self, block: Block) -> None:
        """One more table names it. A cached block leaves the list of evictable ones."""
        if block.ref_count == 0:
            (self._blank if block.content is None else self._cached).remove(block)
        block.ref_count += 1

    def unref(self, block: Block) -> None:
        """One table fewer names it. Findable blocks become the most recently used of the cached ones."""
        assert block.ref_count > 0 and block.id != 0, f"double free of {block}"
        block.ref_count -= 1
        if block.content is not None:
            self._clock += 1
            block.last_use = self._clock
        if block.ref_count == 0:
            (self._blank if block.content is None else self._cached).append(block)

    def store(
        self, block: Block, digest: bytes, parent_id: int, tokens: bytes, extra: bytes, content_id: int | None = None
    ) -> Content:
        """Make a used block findable. What stood under the digest before (an orphan whose parent was evicted, or a
        colliding digest) is withdrawn: the latest content is the likeliest to be asked for."""
        holder = self.index.holder(digest)
        if holder is not None:
            self.withdraw(holder)
        content = self.index.add(block, digest, parent_id, tokens, extra, content_id)
        self._event(CacheEvent("stored", block.id, content.content_id, parent_id, digest))
        return content

    def withdraw(self, block: Block) -> None:
        """Stop a block being findable; an unowned one becomes blank."""
        if block.content is None:
            return
        if block.ref_count == 0:
            self._cached.remove(block)
        self._forget(block)
        if block.ref_count == 0:
            self._blank.append(block)

    def _forget(self, block: Block) -> None:
        content = self.index.remove(block)
        block.last_use = block.hits = 0
        self._event(CacheEvent("removed", block.id, content.content_id, content.parent_id, content.digest))

    def _event(self, event: CacheEvent) -> None:
        if len(self._events) >= MAX_EVENTS:  # nobody reads them: memory stays bounded and the reader is told
            self._events.clear()
            self._events_lost = True
        self._events.append(event)

    def take_events(self) -> list[CacheEvent]:
        """Everything that happened since the last call, oldest first."""
        events = list(self._events)
        if self._events_lost:
            events.insert(0, CacheEvent("lost", 0))
        self._events.clear()
        self._events_lost = False
        return events

    def check_integrity(self) -> None:
        """Every block is in exactly one place. Raises: AssertionError."""
        blank, cached = {b.id for b in self._blank}, {b.id for b in self._cached}
        assert len(blank) == len(self._blank) and len(cached) == len(self._cached)
        assert not blank & cached and 0 not in blank | cached
        indexed = {b.id for b in self.index}
        for block in self.blocks[1:]:
            assert block.ref_count >= 0
            assert (block.id in blank) == (block.ref_count == 0 and block.content is None), block
            assert (block.id in cached) == (block.ref_count == 0 and block.content is not None), block
            assert (block.id in indexed) == (block.content is not None), block
            if block.content is not None:
                assert self.index.holder(block.content.digest) is block
        assert self.blocks[0].ref_count == 0 and self.blocks[0].content is None
