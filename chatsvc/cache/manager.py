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
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter

from chatsvc.cache.block import Block
from chatsvc.cache.host import HostTier, Swapped
from chatsvc.cache.index import ROOT_ID, PrefixIndex
from chatsvc.cache.kept import KeptList
from chatsvc.cache.pool import BlockPool, CacheEvent

_id_of = attrgetter("id")


@dataclass(slots=True)
class BlockTable:
    """A sequence's blocks.

    Attributes:
        extra: encoded extra keys, part of the identity of every block.
        blocks: physical blocks in logical order.
        digests: digests of the sequence's full blocks, as far as computed (a cache of pure values: survives a free).
        content_ids: content ids of the leading blocks whose identity is settled.
        swapped: what the host tier keeps of it while it is preempted.
    """

    extra: bytes = b""
    blocks: list[Block] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    content_ids: list[int] = field(default_factory=list)
    swapped: Swapped | None = None

    _ids: array[int] = field(default_factory=lambda: array("q"), repr=False)

    def first_ids(self, count: int) -> array[int]:
        """Ids of the first ``count`` blocks, a copy. Asked for at every step: only what was appended since is looked
        at, and the rest is a copy of bytes."""
        ids = self._ids
        if len(ids) < len(self.blocks):
            ids.extend(map(_id_of, self.blocks[len(ids) :]))
        return ids[:count]

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(map(_id_of, self.blocks))

    def changed(self) -> None:
        """Blocks were replaced or taken away, not just appended."""
        del self._ids[:]


@dataclass(frozen=True, slots=True)
class Match:
    """What continues a table, found in the cache. Valid until the next change of a pool.

    Attributes:
        blocks: full blocks, on the device or (``on_host``) in the host tier.
        on_host: for each of them.
        tail: the sequence's own partial last block in the host tier, where everything before it was found.
        num_tokens: tokens that the table covers with all this.
    """

    blocks: tuple[Block, ...] = ()
    on_host: tuple[bool, ...] = ()
    tail: Block | None = None
    num_tokens: int = 0

    @property
    def num_missing(self) -> int:
        """Available blocks that taking it costs: evictable ones stop being available, host blocks need new ones."""
        fresh = sum(self.on_host) + (self.tail is not None)
        return fresh + sum(b.ref_count == 0 for b, away in zip(self.blocks, self.on_host, strict=True) if not away)


@dataclass(frozen=True, slots=True)
class StepMoves:
    """Blocks to be copied before a step: within the device's pool (source, target), out to the host tier (device,
    host), and back in (host, device)."""

    copies: tuple[tuple[int, int], ...]
    out: tuple[tuple[int, int], ...]
    into: tuple[tuple[int, int], ...]


class BlockManager:
    """Args:
    prefix_caching: equal prefixes share blocks.
    num_host_blocks: size of the host tier; 0: none.
    keep_shared: seconds that prefixes which many requests share are kept after their last use, 0: like all others.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        secret: bytes = b"",
        num_host_blocks: int = 0,
        keep_shared: float = 0.0,
    ) -> None:
        ids = count(ROOT_ID + 1)
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        kept = KeptList(num_blocks, keep_shared) if keep_shared else None
        self.pool = BlockPool(num_blocks, PrefixIndex(secret, ids), kept)
        self.host = HostTier(num_host_blocks, PrefixIndex(secret, ids)) if num_host_blocks else None
        if self.host is not None:
            self.pool.on_evict = self.host.keep
        self.cow_copies = 0
        self._copies: list[tuple[int, int]] = []
        self._stored: list[Block] = []  # what the step that is being planned fills, findable or a twin
        self._in_flight: deque[list[Block]] = deque()  # by those that have been submitted, oldest first

    @property
    def _identified(self) -> bool:
        """Whether full blocks get an identity: to be shared, or at least (private extra keys) to be swapped."""
        return self.prefix_caching or self.host is not None

    @property
    def tiers(self) -> tuple[BlockPool, ...]:
        """The device's pool and, if there is one, the host tier's."""
        return (self.pool,) if self.host is None else (self.pool, self.host.pool)

    def unsettled(self) -> frozenset[int]:
        """Content ids that are findable although the step which brings them has not been seen to end well."""
        stored = [b for step in (*self._in_flight, self._stored) for b in step]
        blocks = [*stored, *(self.host.arriving if self.host is not None else ())]
        return frozenset(b.content.content_id for b in blocks if b.content is not None)

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
        if not self._identified or len(table.content_ids) < start:
            return Match()
        size = self.block_size
        parent = table.content_ids[-1] if start else ROOT_ID
        found: list[Block] = []
        away: list[bool] = []
        for i in range(start, len(tokens) // size):
            part = tokens[i * size : (i + 1) * size].tobytes()
            key = (self._digest(table, tokens, i), parent, part, b"" if i else table.extra)
            block = self.pool.index.find(*key)
            on_host = block is None and self.host is not None
            if block is None and self.host is not None:
                block = self.host.find(*key)
            if block is None or block.content is None:
                break
            found.append(block)
            away.append(on_host)
            parent = block.content.content_id
        covered = (start + len(found)) * size
        swapped = table.swapped
        if swapped is not None and swapped.tail is not None and covered == swapped.computed // size * size:
            return Match(tuple(found), tuple(away), swapped.tail, swapped.computed)
        return Match(tuple(found), tuple(away), None, covered)

    def missing(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> int:
        """Blocks out of ``num_available`` that ``allocate`` with the same arguments takes."""
        match = match or Match()
        have = len(table.blocks) + len(match.blocks) + (match.tail is not None)
        new = max(0, self.blocks_for(num_tokens) - have)
        return new + match.num_missing + (self._shared_at(table, num_tokens, computed) is not None)

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
        shared = self._shared_at(table, num_tokens, computed)
        if match is None and shared is None and num_tokens <= len(table.blocks) * self.block_size:
            return True  # the usual decode step
        if self.missing(table, num_tokens, match, computed) > self.pool.num_available:
            return False
        if shared is not None:
            old, new = table.blocks[shared], self._take()
            table.blocks[shared] = new
            table.changed()
            self._copies.append((old.id, new.id))
            self.cow_copies += 1
            self.pool.unref(old)
        if match is not None:
            self._append(table, match)
        while len(table.blocks) * self.block_size < num_tokens:
            table.blocks.append(self._take())
        return True

    def _take(self) -> Block:
        block = self.pool.take()
        if self.host is not None:
            self.host.device_taken(block.id)
        return block

    def _append(self, table: BlockTable, match: Match) -> None:
        # Everything found is held before anything is taken: taking evicts.
        for block, away in zip(match.blocks, match.on_host, strict=True):
            (self.host.pool if away and self.host else self.pool).ref(block)
        for block, away in zip(match.blocks, match.on_host, strict=True):
            c = block.content
            assert c is not None
            table.content_ids.append(c.content_id)
            if away and self.host is not None:
                device = self._take()
                self.host.fetch(block, device)
                self.host.pool.unref(block)
                self.pool.store(device, c.digest, c.parent_id, c.tokens, c.extra, c.content_id)
                self._stored.append(device)
                block = device
            block.hits += 1
            table.blocks.append(block)
        if match.tail is not None and self.host is not None:
            device = self._take()
            self.host.fetch(match.tail, device)
            table.blocks.append(device)

    def store_full(self, table: BlockTable, tokens: array[int], num_computed: int, *, submitted: bool = False) -> None:
        """Give every full block below ``num_computed`` its identity.

        Called when the step that fills them is submitted: steps run in order and a layer writes its KV before
        attention reads it, so later rows of the same step may already read them. ``submitted``: it is the last step
        that was submitted, whose tokens were not all known then.
        """
        if not self._identified:
            return
        size = self.block_size
        stored = self._in_flight[-1] if submitted else self._stored
        while (len(table.content_ids) + 1) * size <= num_computed:
            i = len(table.content_ids)
            digest, part = self._digest(table, tokens, i), tokens[i * size : (i + 1) * size].tobytes()
            parent = table.content_ids[-1] if i else ROOT_ID
            extra = b"" if i else table.extra
            twin = self.pool.index.find(digest, parent, part, extra)
            if twin is not None and twin.content is not None:
                # Somebody computed the same content meanwhile: theirs stays findable, ours keeps serving this table.
                content = twin.content
            else:
                content = self.pool.store(table.blocks[i], digest, parent, part, extra)
            table.content_ids.append(content.content_id)
            stored.append(table.blocks[i])

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        """The child sees the parent's blocks, the partial last one included; whoever writes into it first copies it."""
        assert not child.blocks
        for block in parent.blocks:
            self.pool.ref(block)
            child.blocks.append(block)
        child.content_ids[:] = parent.content_ids
        child.digests[:] = parent.digests[: len(parent.content_ids)]

    def seal(self) -> StepMoves:
        """What the planned step does before its forward pass. From here on it is in flight, until ``step_over``."""
        out, into = self.host.seal() if self.host is not None else ((), ())
        moves = StepMoves(tuple(self._copies), out, into)
        self._copies.clear()
        self._in_flight.append(self._stored)
        self._stored = []
        return moves

    def step_over(self, *, failed: bool = False) -> None:
        """The oldest step in flight is done. If it failed, the blocks that it should have filled are not what they
        were said to be."""
        if not self._in_flight:
            self.seal()
        stored = self._in_flight.popleft()
        if failed:
            self.withdraw(stored)
        if self.host is not None:
            self.host.step_over(failed=failed)

    @property
    def newest_is_bare(self) -> bool:
        """Whether no block counts as full because of the newest step in flight."""
        return not self._in_flight[-1]

    def take_back(self) -> None:
        """The newest step in flight, which moves nothing and is bare, does not happen."""
        assert not self._in_flight.pop()
        if self.host is not None:
            self.host.take_back()

    def withdraw(self, blocks: Iterable[Block]) -> None:
        """Stop blocks being findable."""
        for block in blocks:
            self.pool.withdraw(block)

    def swap_out(self, table: BlockTable, computed: int) -> bool:
        """Pin what the table has computed in the host tier, then free it. False, and nothing done, without room."""
        if self.host is None or not computed:
            return False
        settled = len(table.content_ids)
        # A settled block without content of its own is a twin: the one that is findable is the one to keep.
        full = [self.pool.index.holder(d) or b for d, b in zip(table.digests, table.blocks[:settled], strict=False)]
        partial = computed > settled * self.block_size
        swapped = self.host.swap_out(full, table.blocks[settled] if partial else None, computed)
        if swapped is None:
            return False
        self.free(table)
        table.swapped = swapped
        return True

    def came_back(self, table: BlockTable) -> None:
        """The sequence runs again (what it needed is being fetched), or has ended: its pins go."""
        if table.swapped is not None and self.host is not None:
            self.host.release(table.swapped)
        table.swapped = None

    def free(self, table: BlockTable, *, ended: bool = False) -> None:
        """Give all blocks back, tail first, so that a sequence's tail is evicted before its head. Idempotent.

        Without prefix caching nobody can use an ended sequence's blocks: they are not kept.
        """
        while table.blocks:
            block = table.blocks.pop()
            if ended and not self.prefix_caching and block.ref_count == 1:
                self.pool.withdraw(block)
            self.pool.unref(block)
        table.content_ids.clear()
        table.changed()

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
        tables = list(tables)
        self.pool.check_integrity()
        if self.host is not None:
            self.host.check_integrity([t.swapped for t in tables if t.swapped is not None])
        counts: dict[int, int] = {}
        for table in tables:
            ids = table.ids
            assert tuple(table.first_ids(len(ids))) == ids
            assert len(set(ids)) == len(ids), f"a table names a block twice: {ids}"
            assert len(table.content_ids) <= len(table.blocks)
            for i in ids:
                counts[i] = counts.get(i, 0) + 1
        for block in self.pool.blocks[1:]:
            assert block.ref_count == counts.get(block.id, 0), (block, counts.get(block.id, 0))
