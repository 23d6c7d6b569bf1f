"""The block manager: which physical blocks hold which part of which sequence.

::

    tokens   | block 0        | block 1        | block 2 (partial)
    table    [ 17 ----------- , 4 ------------ , 9 ------- . . . . ]
    content  [ c1 (root)       , c2 (after c1)  ]                       <- full blocks have an identity
               shared by 3        shared by 3     private, ref_count 1

Everything here is O(blocks touched). Nothing here knows about tensors: a block is a number.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from chatsvc.cache.block import Block
from chatsvc.cache.index import ROOT_ID, PrefixIndex
from chatsvc.cache.pool import BlockPool, CacheEvent


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks.

    Attributes:
        extra: encoded extra keys, part of the identity of every block.
        blocks: physical blocks in logical order.
        digests: digests of the sequence's full blocks, as far as computed (a cache of pure values: survives a free).
        content_ids: content ids of the leading blocks whose identity is settled.
    """

    extra: bytes = b""
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    content_ids: list[int] = field(default_factory=list)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(b.id for b in self.blocks)


@dataclass(frozen=True, slots=True)
class Match:
    """Blocks that continue a table, found in the cache. Valid until the next change of the pool."""

    blocks: tuple[Block, ...] = ()

    @property
    def num_evictable(self) -> int:
        """How many of them nobody uses now: taking them makes that many blocks fewer available."""
        return sum(b.ref_count == 0 for b in self.blocks)


class BlockManager:
    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True, secret: bytes = b"") -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(num_blocks, PrefixIndex(secret))
        self.cow_copies = 0
        self._copies: list[tuple[int, int]] = []

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _digest(self, table: BlockTable, tokens: array[int], i: int) -> bytes:
        """Digest of full block i; those before it are computed on the way."""
        size = self.block_size
        while len(table.digests) <= i:
            j = len(table.digests)
            parent = table.digests[-1] if j else table.extra
            table.digests.append(self.pool.index.digest(parent, tokens[j * size : (j + 1) * size].tobytes()))
        return table.digests[i]

    def next_digest(self, table: BlockTable, tokens: array[int], num_computed: int) -> bytes | None:
        """Digest of the block that holds position ``num_computed``, or None when its tokens are not all known."""
        i = num_computed // self.block_size
        return self._digest(table, tokens, i) if (i + 1) * self.block_size <= len(tokens) else None

    def match(self, table: BlockTable, tokens: array[int]) -> Match:
        """Cached blocks that continue the table. Pure, but for the table's memory of digests.

        A table whose last block is not settled (partial, or not findable) has nothing to continue: empty.
        """
        start = len(table.blocks)
        if not self.prefix_caching or len(table.content_ids) < start:
            return Match()
        size = self.block_size
        parent = table.content_ids[-1] if start else ROOT_ID
        found: list[Block] = []
        for i in range(start, len(tokens) // size):
            part = tokens[i * size : (i + 1) * size].tobytes()
            block = self.pool.index.find(self._digest(table, tokens, i), parent, part, b"" if i else table.extra)
            if block is None or block.content is None:
                break
            found.append(block)
            parent = block.content.content_id
        return Match(tuple(found))

    def missing(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> int:
        """Blocks out of ``num_available`` that ``allocate`` with the same arguments takes."""
        match = match or Match()
        new = max(0, self.blocks_for(num_tokens) - len(table.blocks) - len(match.blocks))
        return new + match.num_evictable + (self._shared_at(table, num_tokens, computed) is not None)

    def _shared_at(self, table: BlockTable, num_tokens: int, computed: int) -> int | None:
        """Index of a block that others read too and that a step from ``computed`` to ``num_tokens`` writes into.

        Settled blocks are never written (a fully cached prompt recomputes its last token with slot -1), so it can only
        be the partial last block that forks share.
        """
        first = max(computed, len(table.content_ids) * self.block_size)
        i = first // self.block_size
        shared = first < num_tokens and i < len(table.blocks) and table.blocks[i].ref_count > 1
        return i if shared else None

    def allocate(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> bool:
        """Append the matched blocks and as many fresh ones as it takes to cover ``num_tokens``: all or nothing.

        A shared block that will be written is replaced by a private one, and the copy is recorded (copy on write).
        """
        if self.missing(table, num_tokens, match, computed) > self.pool.num_available:
            return False
        shared = self._shared_at(table, num_tokens, computed)
        if shared is not None:
            old, new = table.blocks[shared], self.pool.take()
            table.blocks[shared] = new
            self._copies.append((old.id, new.id))
            self.cow_copies += 1
            self.pool.unref(old)
        for block in match.blocks if match else ():
            assert block.content is not None
            self.pool.ref(block)
            table.blocks.append(block)
            table.content_ids.append(block.content.content_id)
        while len(table.blocks) * self.block_size < num_tokens:
            table.blocks.append(self.pool.take())
        return True

    def store_full(self, table: BlockTable, tokens: array[int], num_computed: int) -> list[Block]:
        """Give every full block below ``num_computed`` its identity; returns those that became findable.

        Called when the step that fills them is submitted: steps run in order and a layer writes its KV before
        attention reads it, so later rows of the same step may already read them.
        """
        stored: list[Block] = []
        if not self.prefix_caching:
            return stored
        size = self.block_size
        while (len(table.content_ids) + 1) * size <= num_computed:
            i = len(table.content_ids)
            digest, part = self._digest(table, tokens, i), tokens[i * size : (i + 1) * size].tobytes()
            parent = table.content_ids[-1] if i else ROOT_ID
            extra = b"" if i else table.extra
            twin = self.pool.index.find(digest, parent, part, extra)
            if twin is not None and twin.content is not None:
                # Somebody computed the same content meanwhile: theirs stays findable, ours keeps serving this table.
                table.content_ids.append(twin.content.content_id)
                continue
            block = table.blocks[i]
            table.content_ids.append(self.pool.store(block, digest, parent, part, extra).content_id)
            stored.append(block)
        return stored

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """The child sees the parent's blocks, the partial last one included; whoever writes into it first copies it."""
        assert not child.blocks
        for block in parent.blocks:
            self.pool.ref(block)
            child.blocks.append(block)
        child.content_ids[:] = parent.content_ids

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Copies recorded since the last call: (source, target) block ids, to be done before anything is written."""
        copies = tuple(self._copies)
        self._copies.clear()
        return copies

    def withdraw(self, blocks: Iterable[Block]) -> None:
        """The step that should have filled them failed: they were never what they were said to be."""
        for block in blocks:
            self.pool.withdraw(block)

    def free(self, table: BlockTable) -> None:
        """Give all blocks back, tail first, so that a sequence's tail is evicted before its head. Idempotent."""
        while table.blocks:
            self.pool.unref(table.blocks.pop())
        table.content_ids.clear()

    def take_events(self) -> list[CacheEvent]:
        return self.pool.take_events()

    def filled_slots(self, tables: Iterable[tuple[BlockTable, int]]) -> tuple[int, int]:
        """(filled, allocated) slots over the blocks of the given (table, num_computed); a shared block counts once."""
        fill: dict[int, int] = {}
        for table, computed in tables:
            for i, block in enumerate(table.blocks):
                here = min(self.block_size, max(0, computed - i * self.block_size))
                fill[block.id] = max(fill.get(block.id, 0), here)
        return sum(fill.values()), len(fill) * self.block_size

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """The pool is whole and reference counts equal the tables that name each block. Raises: AssertionError."""
        self.pool.check_integrity()
        counts: dict[int, int] = {}
        for table in tables:
            ids = table.ids
            assert len(set(ids)) == len(ids), f"a table names a block twice: {ids}"
            assert len(table.content_ids) <= len(table.blocks)
            for i in ids:
                counts[i] = counts.get(i, 0) + 1
        for block in self.pool.blocks[1:]:
            assert block.ref_count == counts.get(block.id, 0), (block, counts.get(block.id, 0))
