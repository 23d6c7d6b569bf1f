"""The buddy allocator and contiguous reservation, against plain truths."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.cache.manager import BlockTable
from chatsvc.sim.contiguous import Buddy, ReservingManager, reserve_max, reserve_oracle, reserve_pow2

TABLE = st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=80)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 200), TABLE)
def test_extents_never_overlap_and_come_back_whole(size: int, steps: list[tuple[bool, int]]) -> None:
    buddy = Buddy(size)
    fresh = [dict(f) for f in buddy._free]
    held: list[tuple[int, int]] = []
    for take, n in steps:
        if take and buddy.fits(n):
            start = buddy.take(n)
            width = 1 << Buddy.order(n)
            assert n <= width < 2 * n and start >= 0 and start + width <= size
            assert all(start + width <= s or s + (1 << Buddy.order(m)) <= start for s, m in held)
            held.append((start, n))
        elif take:
            with pytest.raises(IndexError):
                buddy.take(n)
        elif held:
            buddy.give(*held.pop(n % len(held)))
        free = sum(len(f) << k for k, f in enumerate(buddy._free))
        assert free + sum(1 << Buddy.order(m) for _, m in held) == size
    for extent in held:
        buddy.give(*extent)
    assert [dict(f) for f in buddy._free] == fresh


def test_reservations() -> None:
    assert reserve_max(100, 25, 2048) == 2048
    assert reserve_oracle(100, 25, 2048) == 125
    assert reserve_pow2(100, 25, 2048) == 132  # the paper's example: 25 reserves 32
    assert reserve_pow2(100, 32, 2048) == 132
    assert reserve_pow2(100, 1, 2048) == 101
    assert reserve_pow2(1024, 1000, 2048) == 2048
    assert reserve_pow2(1500, 500, 2000) == 2000


def test_a_sequence_holds_one_extent_for_life() -> None:
    manager = ReservingManager(16, 4)
    a, b, c = BlockTable(), BlockTable(), BlockTable()
    for table, tokens in ((a, 20), (b, 30), (c, 4)):
        manager.expect(table, tokens)
    assert manager.missing(a, 3) == 8 and manager.allocate(a, 3)  # 5 blocks, rounded up to 8
    assert manager.allocate(b, 1) and manager.reserved_tokens == 50
    assert manager.missing(c, 1) > manager.pool.num_available and not manager.allocate(c, 1)
    ids = a.ids
    assert ids == tuple(range(ids[0], ids[0] + 8))
    assert manager.allocate(a, 20) and a.ids == ids and manager.missing(a, 20) == 0
    with pytest.raises(AssertionError, match="outgrows"):
        manager.allocate(a, 21)
    manager.check_integrity([a, b, c])
    manager.free(a)
    manager.free(a)
    assert manager.allocate(c, 4) and c.ids[0] in ids
    manager.free(b)
    manager.free(c)
    manager.check_integrity([a, b, c])
    assert manager.pool.num_free == 16 and manager.reserved_tokens == 0
