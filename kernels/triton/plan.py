"""Who attends to what in one step, decided on the host from lengths and block tables alone: no torch, no triton.

All rows at once in numpy: a loop over them would take several times as long, and the device waits for it.

The attention kernel runs *pieces*: some rows (tokens) against a stretch of keys that all of them read through one block
table. Prefill, decode, split-KV and shared prefixes are nothing but different pieces::

    prefill chunk        rows of one sequence, tiles of a few tokens      keys 0 .. the tile's last position
    decode               one row                                          all its keys
    split-KV             the same rows several times                      cut at multiples of SEGMENT
    shared prefix        rows of several sequences                        the blocks that their tables have in common
      + their suffixes   one row each                                     what is left

A row that stands in one piece is finished by it. Otherwise each of its pieces leaves (largest score, sum, weighted
values) in a partial, and a merge joins the row's partials from left to right::

    A  [ shared by A B C        ][ shared by A B ][ own ]      partials 0 1 2
    B  [ shared by A B C        ][ shared by A B ][ own ]      partials 3 4 5
    C  [ shared by A B C        ][ own ]                       partials 6 7
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

# Keys are cut at multiples of it, counted from position 0, whatever the block size: where a piece may end does not
# depend on who else is in the step.
SEGMENT = 64
# A piece that was split has at least so many segments, or its partials would cost more than its keys. That is also more
# than the tokens of a tile: in each of its pieces a row sees at least the first key.
MIN_SPLIT = 4
# A prefix of L tokens is shared by N sequences when (N - 1) * L, the keys that need not be read again, is more than
# SHARE_COST * N * group: every sequence writes and reads one more partial in float32 for each of its heads.
SHARE_COST = 8

PIECE, ROW, MERGE = 6, 3, 3  # numbers in one of each

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


@dataclass(frozen=True, slots=True)
class Run:
    """Sequences whose tables begin with the same blocks.

    Attributes:
        members: indices of the sequences (two or more).
        first, end: the keys of this run; those before ``first`` are covered by the runs that came before.
    """

    members: tuple[int, ...]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Flat int32 arrays for the kernel; offsets are counted in numbers.

    Attributes:
        pieces: [P, 6] first row, rows, offset of the block table in ``tables``, first key, end key, part: which of
            their partials the rows fill. Long ones first, so that none is left alone at the end.
        rows: [R, 3] token (row of q), position, first partial, or -1: the row's only piece writes the output.
        merges: [M, 3] token, first partial, partials.
        tables: block ids of every sequence, one sequence after the other.
        num_partials: of all rows.
        tile_rows: rows of a tile, in query heads: BLOCK_M of the kernel.
    """

    pieces: array[int]
    rows: array[int]
    merges: array[int]
    tables: array[int]
    num_partials: int
    tile_rows: int


def shared_runs(
    tables: Sequence[Sequence[int]], keys: Sequence[int], block_size: int, group: int
) -> tuple[list[int], list[Run]]:
    """Find the prefixes that are worth reading once, from the block ids alone.

    Args:
        tables: [S] block ids; all of one kind (arrays, lists, tuples).
        keys: [S] tokens that each sequence reads.
        group: query heads of a KV head.

    Returns:
        An order of the sequences in which those of a run stand side by side, and the runs, a run before the runs
        inside it. A run ends on a multiple of :data:`SEGMENT`.
    """
    order = sorted(range(len(tables)), key=tables.__getitem__)  # type: ignore[arg-type]
    common = [0] * len(order)  # keys, in whole segments, that a sequence has in common with the one before it
    blocks = 0
    for at in range(1, len(order)):
        a, b = order[at - 1], order[at]
        least = min(keys[a], keys[b])
        blocks = _common(tables[a], tables[b], -(-least // block_size), blocks)
        common[at] = min(least, blocks * block_size) // SEGMENT * SEGMENT
    runs: list[Run] = []
    todo = [(0, len(order), 0)]
    while todo:
        begin, end, first = todo.pop()
        while begin < end:
            stop = begin + 1
            while stop < end and common[stop] > first:
                stop += 1
            if (count := stop - begin) > 1:
                shared = min(common[begin + 1 : stop])
                if (count - 1) * (shared - first) > SHARE_COST * count * group:
                    runs.append(Run(tuple(order[begin:stop]), first, shared))
                    todo.append((begin, stop, shared))
                else:  # too little in common: those that have more of it may still share
                    todo += _deeper(common, begin, stop, shared, first)
            begin = stop
    return order, sorted(runs, key=lambda run: run.first)


def plan_attention(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Sequence[int]],
    block_size: int,
    *,
    group: int,
    kv_heads: int,
    programs: int,
    wide: int,
    cascade: bool = True,
) -> AttentionPlan:
    """The pieces of a step.

    Args:
        query_lens, seq_lens: [S] tokens of each sequence in q, and in the cache; the last query stands at seq_len - 1.
        tables: [S] block ids that cover ``seq_len`` tokens, all of one kind; int64 arrays are the fastest.
        group: query heads of a KV head.
        programs: how many programs keep the device busy: with fewer pieces than that, keys are split.
        wide: rows of a tile when tokens can share one; a tile has 16 otherwise, the least that ``tl.dot`` takes.
        cascade: read shared prefixes once.
    """
    queries, lens = np.array(query_lens, np.int64), np.array(seq_lens, np.int64)
    table_at = np.array([0, *itertools.accumulate(map(len, tables))][:-1], np.int64)
    token_at = np.cumsum(queries) - queries
    singles, several = np.flatnonzero(queries == 1), np.flatnonzero(queries != 1)
    runs: list[Run] = []
    if cascade and len(singles) > 1:
        own = singles.tolist()
        order, runs = shared_runs([tables[i] for i in own], lens[singles].tolist(), block_size, group)
        singles = singles[order]
    tile_rows = max(wide if runs or len(several) else 16, 1 << (group - 1).bit_length())
    tile = tile_rows // group

    tokens = [_count_up(token_at[several], queries[several]), token_at[singles]]
    positions = [_count_up(lens[several] - queries[several], queries[several]), lens[singles] - 1]
    base = len(tokens[0])  # of the rows of singles
    spans: list[tuple[Ints, ...]] = []  # first row, rows, offset of the table, first key, end key
    # Prefill: tiles of adjacent tokens, each against all keys up to its last token.
    tiles = -(-queries[several] // tile)
    first = _count_up(np.zeros_like(tiles), tiles) * tile
    count = np.minimum(tile, np.repeat(queries[several], tiles) - first)
    row = np.repeat(np.cumsum(queries[several]) - queries[several], tiles) + first
    end = np.repeat(lens[several] - queries[several], tiles) + first + count
    spans.append((row, count, np.repeat(table_at[several], tiles), np.zeros_like(first), end))
    covered = np.zeros(len(singles), np.int64)
    if runs:
        place = {m: at for at, m in enumerate(order)}
        for run in runs:
            begin, members = place[run.members[0]], len(run.members)
            at = np.arange(0, members, tile)
            table, first, end = (np.full(len(at), x) for x in (table_at[singles[begin]], run.first, run.end))
            spans.append((base + begin + at, np.minimum(tile, members - at), table, first, end))
            covered[begin : begin + members] = run.end
    # A suffix is never empty when a run ends before the last key; when it ends on it, nothing is left.
    left = np.flatnonzero(covered < lens[singles])
    spans.append((base + left, np.ones_like(left), table_at[singles[left]], covered[left], lens[singles[left]]))

    row, count, table, first, end = (np.concatenate(column) for column in zip(*spans, strict=True))
    segments = -((first - end) // SEGMENT)
    step = max(MIN_SPLIT, -(-int(segments.sum()) * kv_heads // programs))
    cuts = np.maximum(1, segments // step)
    part, parts = _parts(row, count, cuts, len(left), base + len(singles))
    # Pieces of about equal length that end on multiples of SEGMENT (``first`` is one).
    span = np.repeat(np.arange(len(cuts)), cuts)
    nth = _count_up(np.zeros_like(cuts), cuts)
    begins = first[span] + segments[span] * nth // cuts[span] * SEGMENT
    ends = np.append(begins[1:], end[-1:])
    ends[np.cumsum(cuts) - 1] = end
    pieces = np.stack((row[span], count[span], table[span], begins, ends, part[span] + nth), axis=1)
    pieces = pieces[np.argsort(begins - ends, kind="stable")]

    split = parts > 1
    partial = np.cumsum(parts * split) - parts * split
    token, position = np.concatenate(tokens), np.concatenate(positions)
    rows = np.stack((token, position, np.where(split, partial, -1)), axis=1)
    merges = np.stack((token[split], partial[split], parts[split]), axis=1)
    flat_tables = array("q")
    for ids in tables:
        flat_tables.extend(ids)  # of another array it is a copy of its bytes
    table_ids = np.frombuffer(flat_tables, np.int64) if flat_tables else np.empty(0, np.int64)
    partials = int(parts[split].sum())
    return AttentionPlan(_flat(pieces), _flat(rows), _flat(merges), _flat(table_ids), partials, tile_rows)


def _parts(row: Ints, count: Ints, cuts: Ints, suffixes: int, num_rows: int) -> tuple[Ints, Ints]:
    """Of each span the number of pieces that its rows have before it (the same for all of them), and of each row the
    number in all. The last ``suffixes`` spans are a row each."""
    before, parts = np.zeros_like(cuts), np.zeros(num_rows, np.int64)
    others = len(cuts) - suffixes
    for at in range(others):
        before[at] = parts[row[at]]
        parts[row[at] : row[at] + count[at]] += cuts[at]
    before[others:] = parts[row[others:]]
    parts[row[others:]] += cuts[others:]
    return before, parts


def _count_up(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1 ... for each pair of start and count, one after the other."""
    numbers: Ints = np.repeat(starts - (np.cumsum(counts) - counts), counts)
    return numbers + np.arange(len(numbers))


def _flat(numbers: Ints) -> array[int]:
    flat = array("i")
    flat.frombytes(numbers.astype(np.int32).tobytes())
    return flat


def _common(a: Sequence[int], b: Sequence[int], limit: int, guess: int) -> int:
    """How many of the first ``limit`` ids are equal. Comparing slices is cheap: bisection, once ``guess`` (as many as
    the pair before had) has proved wrong."""
    if a[0] != b[0]:  # most often
        return 0
    low, high = 1, min(limit, len(a), len(b))
    guess = min(guess, high)
    if low < guess and a[:guess] == b[:guess]:
        low = guess
        if guess == high or a[guess] != b[guess]:
            return guess
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _deeper(common: list[int], begin: int, stop: int, shared: int, first: int) -> list[tuple[int, int, int]]:
    """Cut a stretch where neighbours have no more than ``shared`` in common; the parts start from ``first`` again."""
    cuts = [begin, *(at for at in range(begin + 1, stop) if common[at] == shared), stop]
    return [(a, b, first) for a, b in itertools.pairwise(cuts) if b - a > 1]
