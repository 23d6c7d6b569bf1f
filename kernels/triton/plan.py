"""Who attends to what in one step, decided on the host from lengths and block tables alone: no torch, no triton.

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
        tables: [S] block ids.
        keys: [S] tokens that each sequence reads.
        group: query heads of a KV head.

    Returns:
        An order of the sequences in which those of a run stand side by side, and the runs, a run before the runs
        inside it. A run ends on a multiple of :data:`SEGMENT`.
    """
    order = sorted(range(len(tables)), key=lambda i: list(tables[i]))
    common = [0] * len(order)  # keys, in whole segments, that a sequence has in common with the one before it
    for at in range(1, len(order)):
        a, b = order[at - 1], order[at]
        least = min(keys[a], keys[b])
        blocks = _common(tables[a], tables[b], -(-least // block_size))
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
        tables: [S] block ids that cover ``seq_len`` tokens.
        group: query heads of a KV head.
        programs: how many programs keep the device busy: with fewer pieces than that, keys are split.
        wide: rows of a tile when tokens can share one; a tile has 16 otherwise, the least that ``tl.dot`` takes.
        cascade: read shared prefixes once.
    """
    table_at = list(itertools.accumulate((len(t) for t in tables), initial=0))
    token_at = list(itertools.accumulate(query_lens, initial=0))
    singles = [i for i, q in enumerate(query_lens) if q == 1]
    runs: list[Run] = []
    if cascade and len(singles) > 1:
        order, found = shared_runs([tables[i] for i in singles], [seq_lens[i] for i in singles], block_size, group)
        runs = [Run(tuple(singles[m] for m in run.members), run.first, run.end) for run in found]
        singles = [singles[i] for i in order]
    tile_rows = max(wide if runs or len(singles) < len(query_lens) else 16, 1 << (group - 1).bit_length())
    tile = tile_rows // group

    rows: list[tuple[int, int]] = []  # token, position
    spans: list[tuple[int, int, int, int, int]] = []  # first row, rows, table, first key, end key
    for i, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        if query_len == 1:
            continue
        before, base = seq_len - query_len, len(rows)
        rows += [(token_at[i] + t, before + t) for t in range(query_len)]
        for first in range(0, query_len, tile):
            count = min(tile, query_len - first)
            spans.append((base + first, count, table_at[i], 0, before + first + count))
    row_of = {i: len(rows) + at for at, i in enumerate(singles)}
    rows += [(token_at[i], seq_lens[i] - 1) for i in singles]
    covered = dict.fromkeys(singles, 0)
    for run in runs:
        first_row = row_of[run.members[0]]
        for at in range(0, len(run.members), tile):
            count = min(tile, len(run.members) - at)
            spans.append((first_row + at, count, table_at[run.members[0]], run.first, run.end))
        covered.update(dict.fromkeys(run.members, run.end))
    # A suffix is never empty when a run ends before the last key; when it ends on it, nothing is left.
    spans += [(row_of[i], 1, table_at[i], covered[i], seq_lens[i]) for i in singles if covered[i] < seq_lens[i]]

    work = sum(_segments(first, end) for _, _, _, first, end in spans)
    step = max(MIN_SPLIT, -(-work * kv_heads // programs))
    parts = [0] * len(rows)
    pieces: list[tuple[int, int, int, int, int, int]] = []
    for row, count, table, first, end in spans:
        cuts = _cut(first, end, max(1, _segments(first, end) // step))
        pieces += [(row, count, table, a, b, parts[row] + j) for j, (a, b) in enumerate(cuts)]
        for r in range(row, row + count):
            parts[r] += len(cuts)
    pieces.sort(key=lambda piece: piece[3] - piece[4])

    flat_rows, merges, partials = array("i"), array("i"), 0
    for (token, position), count in zip(rows, parts, strict=True):
        flat_rows.extend((token, position, partials if count > 1 else -1))
        if count > 1:
            merges.extend((token, partials, count))
            partials += count
    flat_tables = array("i")
    for table_ids in tables:
        flat_tables.extend(table_ids)
    return AttentionPlan(
        array("i", itertools.chain.from_iterable(pieces)), flat_rows, merges, flat_tables, partials, tile_rows
    )


def _common(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first ``limit`` ids are equal, by bisection: comparing slices is cheap."""
    if a[0] != b[0]:  # most often
        return 0
    low, high = 1, min(limit, len(a), len(b))
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


def _segments(first: int, end: int) -> int:
    return -(-(end - first) // SEGMENT)


def _cut(first: int, end: int, count: int) -> list[tuple[int, int]]:
    """``count`` stretches of about equal length that end on multiples of SEGMENT (``first`` is one)."""
    segments = _segments(first, end)
    borders = [first + segments * j // count * SEGMENT for j in range(count)]
    return list(zip(borders, [*borders[1:], end], strict=True))
