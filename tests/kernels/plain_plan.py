"""The plan of attention in plain Python, one sequence, key and piece after the other: slow, and easy to believe."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kernels.triton.plan import MIN_SPLIT, SEGMENT, SHARE_COST

Table = Sequence[int]


def common_keys(a: Table, b: Table, keys: int, block_size: int) -> int:
    """Keys, in whole segments, for which both tables name the same blocks from the beginning."""
    same = 0
    while same < keys and a[same // block_size] == b[same // block_size]:
        same += 1
    return same // SEGMENT * SEGMENT


def prefix_runs(
    tables: Sequence[Table], keys: Sequence[int], block_size: int, group: int
) -> tuple[list[int], list[tuple[list[int], int, int]]]:
    """Order of the sequences, and (members, first key, end key) of what is worth sharing, outer runs first."""
    order = sorted(range(len(tables)), key=lambda i: list(tables[i]))
    runs: list[tuple[list[int], int, int]] = []

    def joined(members: list[int]) -> list[int]:
        """What each has in common with the one before it."""
        return [
            common_keys(tables[a], tables[b], min(keys[a], keys[b]), block_size) for a, b in itertools.pairwise(members)
        ]

    def split(members: list[int], more_than: int) -> list[list[int]]:
        """Cut between neighbours that have no more than that in common."""
        parts = [members[:1]]
        for member, common in zip(members[1:], joined(members)):
            if common > more_than:
                parts[-1].append(member)
            else:
                parts.append([member])
        return [part for part in parts if len(part) > 1]

    def look(members: list[int], first: int, apart: int) -> None:
        """Runs among members, which are covered up to ``first`` and are split where no more than ``apart`` is equal."""
        for part in split(members, apart):
            shared = min(joined(part))
            if (len(part) - 1) * (shared - first) > SHARE_COST * len(part) * group:
                runs.append((part, first, shared))
                look(part, shared, shared)
            else:
                look(part, first, shared)

    if order:
        look(order, 0, 0)
    return order, runs


def plain_plan(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    tables: Sequence[Table],
    block_size: int,
    *,
    group: int,
    kv_heads: int,
    programs: int,
    wide: int,
    cascade: bool = True,
) -> tuple[list[list[int]], list[list[int]], list[list[int]], list[int], int]:
    """What ``plan_attention`` must tell: pieces, rows, merges, tables, rows of a tile. Of pieces that are as long as
    one another the order is free."""
    decodes = [i for i, q in enumerate(query_lens) if q == 1]
    runs: list[tuple[list[int], int, int]] = []
    if cascade:
        order, found = prefix_runs([tables[i] for i in decodes], [seq_lens[i] for i in decodes], block_size, group)
        runs = [([decodes[m] for m in members], first, end) for members, first, end in found]
        decodes = [decodes[i] for i in order]
    tile_rows = wide if runs or any(q > 1 for q in query_lens) else 16
    while tile_rows < group:
        tile_rows *= 2
    tile = tile_rows // group

    rows: list[list[int]] = []
    work: list[tuple[list[int], int, int, int]] = []  # its rows, whose table, first key, end key
    for i, count in enumerate(query_lens):
        if count > 1:
            for t in range(count):
                if t % tile == 0:
                    work.append(([], i, 0, 0))
                rows.append([sum(query_lens[:i]) + t, seq_lens[i] - count + t, -1])
                here = [*work[-1][0], len(rows) - 1]
                work[-1] = (here, i, 0, rows[-1][1] + 1)
    row_of = {}
    for i in decodes:
        row_of[i] = len(rows)
        rows.append([sum(query_lens[:i]), seq_lens[i] - 1, -1])
    done = dict.fromkeys(decodes, 0)
    for members, first, end in sorted(runs, key=lambda run: run[1]):
        for at in range(0, len(members), tile):
            work.append(([row_of[m] for m in members[at : at + tile]], members[0], first, end))
        done.update(dict.fromkeys(members, end))
    work += [([row_of[i]], i, done[i], seq_lens[i]) for i in decodes if done[i] < seq_lens[i]]

    def segments(first: int, end: int) -> int:
        return -(-(end - first) // SEGMENT)

    every = sum(segments(first, end) for _, _, first, end in work)
    step = max(MIN_SPLIT, -(-every * kv_heads // programs))
    pieces: list[list[int]] = []
    parts = [0] * len(rows)
    for here, whose, first, end in work:
        n = segments(first, end)
        cuts = max(1, n // step)
        borders = [first + n * j // cuts * SEGMENT for j in range(cuts)] + [end]
        table = sum(len(t) for t in tables[:whose])
        for a, b in itertools.pairwise(borders):
            pieces.append([here[0], len(here), table, a, b, parts[here[0]]])
            for r in here:
                parts[r] += 1
    merges: list[list[int]] = []
    partial = 0
    for row, count in zip(rows, parts, strict=True):
        if count > 1:
            row[2] = partial
            merges.append([row[0], partial, count])
            partial += count
    return pieces, rows, merges, [b for table in tables for b in table], tile_rows
