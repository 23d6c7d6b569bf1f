"""A table of results: the same rows for the terminal and for JSON."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

Value = str | int | float | None


@dataclass(slots=True)
class Section:
    """Attributes:
    name: key in the JSON file.
    columns: (key in a row, heading, format of a number; ``%`` formats a share as a percentage).
    notes: what one must know to read the numbers.
    """

    name: str
    title: str
    columns: Sequence[tuple[str, str, str]]
    rows: list[dict[str, Value]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {"title": self.title, "rows": self.rows, "notes": self.notes}

    def print(self, out: TextIO | None = None) -> None:
        out = out or sys.stdout
        cells = [[_cell(row.get(key), fmt) for key, _, fmt in self.columns] for row in self.rows]
        heads = [head for _, head, _ in self.columns]
        widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
        left = [all(isinstance(row.get(key), str | None) for row in self.rows) for key, _, _ in self.columns]
        print(f"\n{self.title}", file=out)
        for line in [heads, ["-" * w for w in widths], *cells]:
            print("  " + "  ".join(_pad(c, w, here) for c, w, here in zip(line, widths, left)).rstrip(), file=out)
        for note in self.notes:
            print(f"  * {note}", file=out)


def _pad(cell: str, width: int, left: bool) -> str:
    return cell.ljust(width) if left else cell.rjust(width)


def _cell(value: Value, fmt: str) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else format(value, fmt)


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share - 1e-9) - 1)]
