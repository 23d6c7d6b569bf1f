"""Orders of eviction against plain models of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.cache.block import Block, Content
from chatsvc.sim.eviction import FrequencyList, SegmentedList


def block(i: int) -> Block:
    made = Block(i)
    made.content = Content(100 + i, 0, b"", b"", b"")
    return made


def ids(blocks) -> list[int]:
    return [b.id for b in blocks]


def test_used_once_goes_before_used_twice() -> None:
    for made in (SegmentedList(100), FrequencyList()):
        a, b, c = (block(i) for i in range(3))
        for x in (a, b, c):
            made.append(x)
        made.remove(a)
        made.append(a)
        assert len(made) == 3 and sorted(ids(made)) == [0, 1, 2]
        assert ids(made.pop() for _ in range(3)) == [1, 2, 0]
        assert len(made) == 0


def test_protected_blocks_are_demoted_when_there_are_too_many() -> None:
    made = SegmentedList(2)  # room for one protected block
    a, b = block(1), block(2)
    for x in (a, b, a, b):
        if x.prev is not None:
            made.remove(x)
        made.append(x)
    assert ids(made.pop() for _ in range(2)) == [1, 2]


def test_old_fame_fades() -> None:
    made = FrequencyList()
    star = block(0)
    for _ in range(5):
        made.append(star)
        made.remove(star)
    made.append(star)  # used six times, long ago
    evicted = None
    for newcomers in range(1, 40):
        new = block(newcomers)
        made.append(new)
        evicted = made.pop()
        if evicted is star:
            break
        assert evicted is new
    assert evicted is star and newcomers == 6


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=120), st.booleans())
def test_every_block_is_in_the_list_once_or_not_at_all(steps: list[int], segmented: bool) -> None:
    made = SegmentedList(8) if segmented else FrequencyList()
    blocks = [block(i) for i in range(8)]
    inside: set[int] = set()
    for i in steps:
        if i == 9:
            if inside:
                inside.remove(made.pop().id)
        elif i < 8 and i in inside:
            made.remove(blocks[i])
            inside.remove(i)
        elif i < 8:
            made.append(blocks[i])
            inside.add(i)
        assert len(made) == len(inside) and sorted(ids(made)) == sorted(inside)
        assert all((b.prev is not None) == (b.id in inside) for b in blocks)
