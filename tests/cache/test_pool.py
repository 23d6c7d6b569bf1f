"""The pool alone: a hypothesis state machine against a plain model, integrity after every rule."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, precondition, rule

from chatsvc.cache.block import Block, BlockList
from chatsvc.cache.index import PrefixIndex, encode_extra
from chatsvc.cache.kept import SHARED_HITS, KeptList
from chatsvc.cache.pool import BlockPool

N = 6


class PoolMachine(RuleBasedStateMachine):
    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(N, PrefixIndex(b"secret"))
        self.refs: dict[int, int] = {}
        self.content: dict[int, bytes] = {}  # block id -> digest
        self.lru: list[int] = []  # cached block ids, least recent first
        self.n = 0

    @precondition(lambda self: self.pool.num_available)
    @rule(target=held)
    def take(self) -> Block:
        blank = self.pool.num_free
        block = self.pool.take()
        assert block.ref_count == 1 and block.content is None and block.id not in self.refs
        if not blank:
            assert block.id == self.lru.pop(0), "least recently used first"
            del self.content[block.id]
        self.refs[block.id] = 1
        return block

    @rule(target=held, block=held)
    def ref(self, block: Block) -> object:
        if block.id not in self.refs:
            return multiple()
        self.pool.ref(block)
        self.refs[block.id] += 1
        return block

    @rule(block=held)
    def unref(self, block: Block) -> None:
        if block.id not in self.refs:
            return
        self.pool.unref(block)
        self.refs[block.id] -= 1
        if not self.refs[block.id]:
            del self.refs[block.id]
            if block.id in self.content:
                self.lru.append(block.id)

    @rule(block=held, key=st.integers(0, 8))
    def store(self, block: Block, key: int) -> None:
        if block.id not in self.refs or block.id in self.content:
            return
        digest = bytes([key])
        for other in [i for i, d in self.content.items() if d == digest]:
            del self.content[other]
            if other in self.lru:
                self.lru.remove(other)
        self.pool.store(block, digest, 0, bytes([key]), b"")
        self.content[block.id] = digest

    @rule(key=st.integers(0, 8))
    def hit(self, key: int) -> None:
        block = self.pool.index.find(bytes([key]), 0, bytes([key]), b"")
        assert (block is not None) == (bytes([key]) in self.content.values())
        if block is None:
            return
        self.pool.ref(block)
        if block.id in self.lru:
            self.lru.remove(block.id)
        self.refs[block.id] = self.refs.get(block.id, 0) + 1
        self.unref(block)

    @rule(block=held)
    def withdraw(self, block: Block) -> None:
        self.pool.withdraw(block)
        self.content.pop(block.id, None)
        if block.id in self.lru:
            self.lru.remove(block.id)

    @invariant()
    def whole(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == len(self.refs)
        assert self.pool.num_cached == len(self.lru)
        assert self.pool.num_free == N - len(self.refs) - len(self.lru)


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestPool = PoolMachine.TestCase


def test_bm01_a_double_free_is_caught() -> None:
    pool = BlockPool(2, PrefixIndex(b""))
    block = pool.take()
    pool.unref(block)
    with pytest.raises(AssertionError, match="double free"):
        pool.unref(block)


def test_block_list_refuses_a_block_twice() -> None:
    blocks = BlockList()
    block = Block(1)
    blocks.append(block)
    with pytest.raises(AssertionError):
        blocks.append(block)
    blocks.remove(block)
    with pytest.raises(AssertionError):
        blocks.remove(block)
    with pytest.raises(IndexError):
        blocks.pop()


def test_extra_keys_never_encode_alike() -> None:
    lists = [
        [], [("a", "b")], [("a", ""), ("", "b")], [("ab", "")], [("", "ab")], [("a", "b"), ("", "")], [("b", "a")],
        [("tenant", "x"), ("salt", "")], [("tenant", ""), ("salt", "x")],
    ]  # fmt: skip
    assert len({encode_extra(keys) for keys in lists}) == len(lists)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0, PrefixIndex(b""))


def test_shared_prefixes_outlive_passing_traffic_for_a_time() -> None:
    now = [0.0]
    kept = KeptList(8, 60.0, lambda: now[0])
    pool = BlockPool(8, PrefixIndex(b""), kept)

    def cached(key: int, hits: int) -> Block:
        block = pool.take()
        pool.store(block, bytes([key]), 0, bytes([key]), b"")
        block.hits = hits
        pool.unref(block)
        pool.check_integrity()
        return block

    shared = [cached(i, SHARED_HITS) for i in range(2)]
    for i in range(30):  # traffic that would push anything out of a pool of eight
        cached(10 + i, 0)
    assert all(b.content is not None and b.content.digest == bytes([i]) for i, b in enumerate(shared))
    now[0] = 61.0
    for i in range(8):
        cached(100 + i, 0)
    assert pool.index.find(bytes([0]), 0, bytes([0]), b"") is None, "its time is over"
    assert all(b.hits == 0 for b in shared)


def test_at_most_half_of_the_pool_is_kept_and_a_full_pool_still_evicts() -> None:
    pool = BlockPool(4, PrefixIndex(b""), KeptList(4, 60.0, lambda: 0.0))
    for key in range(4):
        block = pool.take()
        pool.store(block, bytes([key]), 0, bytes([key]), b"")
        block.hits = SHARED_HITS
        pool.unref(block)
    taken = [pool.take() for _ in range(4)]  # the two that are not kept first, then, nothing else being there, the kept
    assert [b.id for b in taken] == [3, 4, 1, 2]
    pool.check_integrity()
