"""The plan of attention: every row meets each of its keys once, through its own blocks; shared prefixes are found."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_plan import plain_plan

from kernels.triton.plan import SEGMENT, AttentionPlan, plan_attention, shared_runs


def plan(queries: list[int], lens: list[int], tables: list[list[int]], size: int, **options: int) -> AttentionPlan:
    wanted = {"group": 3, "kv_heads": 2, "programs": 8, "wide": 64} | options
    return plan_attention(queries, lens, tables, size, **wanted)  # type: ignore[arg-type]


def chunks(flat: object, size: int) -> list[list[int]]:
    numbers = list(flat)  # type: ignore[call-overload]
    return [numbers[i : i + size] for i in range(0, len(numbers), size)]


def check(
    p: AttentionPlan, queries: list[int], lens: list[int], tables: list[list[int]], size: int, group: int
) -> None:
    """Read the plan as the kernel does."""
    rows = chunks(p.rows, 3)
    owner = [i for i, q in enumerate(queries) for _ in range(q)]  # token -> sequence
    start = [lens[i] - queries[i] for i in range(len(lens))]
    firsts = [sum(queries[:i]) for i in range(len(queries))]
    assert sorted(token for token, _, _ in rows) == list(range(sum(queries)))
    met: dict[int, list[tuple[int, int, int]]] = {r: [] for r in range(len(rows))}
    lengths = []
    for first_row, count, table, first, end, part in chunks(p.pieces, 6):
        assert 0 < count <= p.tile_rows // group
        assert 0 <= first < end and first % SEGMENT == 0
        lengths.append(end - first)
        for r in range(first_row, first_row + count):
            met[r].append((part, first, end))
            assert first <= rows[r][1], "a row that sees nothing of a piece has no largest score"
            own = tables[owner[rows[r][0]]]
            for key in range(first, min(end, rows[r][1] + 1), size):
                assert p.tables[table + key // size] == own[key // size]
    assert lengths == sorted(lengths, reverse=True)
    slots: list[int] = []
    merges = {token: (first, count) for token, first, count in chunks(p.merges, 3)}
    for r, (token, position, partial) in enumerate(rows):
        i = owner[token]
        assert position == start[i] + token - firsts[i]
        found = sorted(met[r])
        assert [part for part, _, _ in found] == list(range(len(found)))
        assert found[0][1] == 0 and found[-1][2] > position
        assert all(a[2] == b[1] for a, b in itertools.pairwise(found))
        assert found[-1][2] <= lens[i]
        if len(found) == 1:
            assert partial == -1 and token not in merges
        else:
            assert merges.pop(token) == (partial, len(found))
            slots += range(partial, partial + len(found))
    assert not merges
    assert sorted(slots) == list(range(p.num_partials))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]], int]:
    """Sequences that branch off from one another at random blocks, as a prefix tree has it."""
    size = draw(st.sampled_from([8, 16, 24, 128]))
    queries: list[int] = []
    lens: list[int] = []
    tables: list[list[int]] = []
    fresh = iter(range(1, 10**6))
    for _ in range(draw(st.integers(1, 8))):
        length = draw(st.integers(1, 900))
        needed = -(-length // size)
        shared: list[int] = []
        if tables:
            parent = draw(st.integers(0, len(tables) - 1))
            shared = tables[parent][: draw(st.integers(0, min(needed, len(tables[parent]))))]
        tables.append(shared + [next(fresh) for _ in range(needed - len(shared))])
        lens.append(length)
        queries.append(draw(st.sampled_from([1, 1, 1, min(length, 70)])))
    return queries, lens, tables, size


@given(steps(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 8, 600]))
@settings(max_examples=60, deadline=None)
def test_every_row_meets_its_keys_once(
    step: tuple[list[int], list[int], list[list[int]], int], group: int, programs: int
) -> None:
    check(plan(*step, group=group, programs=programs), *step, group)


@given(steps(), st.sampled_from([1, 3, 8]), st.sampled_from([1, 8, 600]), st.booleans(), st.booleans())
@settings(max_examples=150, deadline=None)
def test_the_plan_equals_a_plain_one(
    step: tuple[list[int], list[int], list[list[int]], int], group: int, programs: int, cascade: bool, packed: bool
) -> None:
    """Piece for piece and row for row, from lists as from the arrays that the scheduler hands over."""
    queries, lens, tables, size = step
    options = {"group": group, "kv_heads": 2, "programs": programs, "wide": 64, "cascade": cascade}
    p = plan_attention(queries, lens, [array("q", t) for t in tables] if packed else tables, size, **options)
    pieces, rows, merges, flat, tile_rows = plain_plan(*step, **options)
    assert sorted(chunks(p.pieces, 6)) == sorted(pieces)
    assert (chunks(p.rows, 3), chunks(p.merges, 3), list(p.tables)) == (rows, merges, flat)
    assert (p.tile_rows, p.num_partials) == (tile_rows, sum(count for _, _, count in merges))


def tree(size: int, *paths: list[tuple[str, int]]) -> list[list[int]]:
    """Tables of sequences that go through named stretches of blocks."""
    ids: dict[tuple[str, int], int] = {}
    return [[ids.setdefault((name, i), len(ids) + 1) for name, blocks in path for i in range(blocks)] for path in paths]


def test_nested_prefixes_are_found_in_any_order() -> None:
    system, a, own = ("system", 40), ("a", 20), 3
    tables = tree(
        16, [system, a, ("1", own)], [("alone", 63)], [system, ("2", own)], [system, a, ("3", own)], [system, a]
    )
    order, runs = shared_runs(tables, [16 * len(t) for t in tables], 16, group=1)
    assert [(sorted(r.members), r.first, r.end) for r in runs] == [([0, 2, 3, 4], 0, 640), ([0, 3, 4], 640, 960)]
    assert sorted(order) == [0, 1, 2, 3, 4]
    for run in runs:
        places = [order.index(m) for m in run.members]
        assert places == list(range(places[0], places[0] + len(places)))


def test_a_prefix_too_short_for_all_is_shared_by_those_that_have_more() -> None:
    """64 keys in common are not worth a partial for each; the pair inside has 640."""
    tables = tree(16, [("s", 4), ("x", 60), ("1", 1)], [("s", 4), ("y", 9)], [("s", 4), ("x", 60), ("2", 1)])
    _, runs = shared_runs(tables, [16 * len(t) for t in tables], 16, group=8)
    assert [(sorted(r.members), r.first, r.end) for r in runs] == [([0, 2], 0, 1024)]


def test_an_empty_step_is_an_empty_plan() -> None:
    p = plan([], [], [], 16)
    assert (list(p.pieces), list(p.rows), list(p.merges), list(p.tables), p.num_partials) == ([], [], [], [], 0)


def test_nothing_in_common_is_no_run() -> None:
    assert shared_runs([[1, 2], [3, 4], [5]], [32, 32, 5], 16, 1)[1] == []
    assert shared_runs([], [], 16, 1) == ([], [])


def test_equal_blocks_after_different_ones_are_not_a_prefix() -> None:
    assert shared_runs([[1, *range(10, 90)], [2, *range(10, 90)]], [1296, 1296], 16, 1)[1] == []


def test_few_sequences_are_split_and_many_are_not() -> None:
    one = plan([1], [8192], [list(range(1, 513))], 16, programs=64, kv_heads=8)
    assert len(chunks(one.pieces, 6)) == 8
    assert {(end - first) // SEGMENT for _, _, _, first, end, _ in chunks(one.pieces, 6)} == {16}
    many = plan([1] * 64, [1024] * 64, [list(range(64 * i, 64 * i + 64)) for i in range(64)], 16, kv_heads=8)
    assert len(chunks(many.pieces, 6)) == 64 and many.num_partials == 0
    short = plan([1], [4 * SEGMENT], [list(range(1, 17))], 16, programs=10**6)
    assert len(chunks(short.pieces, 6)) == 1


def test_the_split_depends_on_shapes_only() -> None:
    """Block ids without anything in common: the same cuts."""
    lens = [700, 3000, 64, 1]
    one, other = (
        plan([1, 1, 5, 1], lens, [[base * (i + 1) + b for b in range(-(-n // 16))] for i, n in enumerate(lens)], 16)
        for base in (1000, 5000)
    )
    assert sorted(chunks(one.pieces, 6)) == sorted(chunks(other.pieces, 6))


def test_decode_needs_only_narrow_tiles() -> None:
    tables = tree(16, [("1", 4)], [("2", 4)])
    assert plan([1, 1], [64, 64], tables, 16).tile_rows == 16
    assert plan([1, 2], [64, 64], tables, 16).tile_rows == 64
    assert plan([1, 1], [64, 64], tables, 16, group=71).tile_rows == 128


@pytest.mark.parametrize("cascade", [False, True])
def test_cascade_reads_fewer_keys(cascade: bool) -> None:
    tables = tree(16, *([("s", 63), (str(i), 1)] for i in range(64)))
    p = plan([1] * 64, [1008] * 64, tables, 16, cascade=cascade)
    check(p, [1] * 64, [1008] * 64, tables, 16, 3)
    read = sum(end - first for _, _, _, first, end, _ in chunks(p.pieces, 6))
    assert read == (4 * 960 + 64 * 48 if cascade else 64 * 1008)
