"""Charts as SVG text: lines, stacked areas, bars and a grid of cells. No library: the service needs none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

FONT = "font-family='Helvetica, Arial, sans-serif'"
INK, FAINT = "#24292f", "#d8dee4"


def ticks(top: float, count: int = 5) -> list[float]:
    """Round values from 0 to at least ``top``."""
    if top <= 0:
        return [0.0, 1.0]
    raw = top / count
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(m * base for m in (1, 2, 2.5, 5, 10) if m * base >= raw * 0.999)
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


@dataclass(slots=True)
class Canvas:
    """Attributes:
    width, height: pixels of the whole picture.
    """

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, size: int = 12, anchor: str = "start", bold: bool = False) -> None:
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' text-anchor='{anchor}'{weight} fill='{INK}' {FONT}>"
            f"{escape(text)}</text>"
        )

    def rect(self, x: float, y: float, w: float, h: float, fill: str) -> None:
        self.parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{w:.1f}' height='{h:.1f}' fill='{fill}'/>")

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = FAINT) -> None:
        self.parts.append(f"<line x1='{x1:.1f}' y1='{y1:.1f}' x2='{x2:.1f}' y2='{y2:.1f}' stroke='{stroke}'/>")

    def polyline(self, points: Sequence[tuple[float, float]], stroke: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f"<polyline points='{path}' fill='none' stroke='{stroke}' stroke-width='2'/>")
        self.parts += [
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{stroke}'/>" for x, y in points if len(points) < 20
        ]

    def polygon(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f"<polygon points='{path}' fill='{fill}'/>")

    def path(self, d: str, fill: str) -> None:
        self.parts.append(f"<path d='{d}' fill='{fill}'/>")

    def legend(self, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
        for name, colour in entries:
            self.rect(x, y - 9, 11, 11, colour)
            self.text(x + 16, y + 1, name, size=11)
            x += 30 + 6.2 * len(name)

    def render(self) -> str:
        head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' width='{self.width}'>"
        return "\n".join(
            [head, f"<rect width='{self.width}' height='{self.height}' fill='white'/>", *self.parts, "</svg>\n"]
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """A plotting area on a canvas with a y axis from 0 to ``top`` and an x axis from ``x0`` to ``x1``."""

    canvas: Canvas
    left: float
    upper: float
    width: float
    height: float
    x0: float
    x1: float
    top: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        span = (self.x1 - self.x0) or 1.0
        px = self.left + (x - self.x0) / span * self.width
        return px, self.upper + self.height * (1 - min(y, self.top) / self.top)

    def y_axis(self, label: str, suffix: str = "") -> None:
        for value in ticks(self.top):
            if value <= self.top * 1.001:
                _, y = self.at(self.x0, value)
                self.canvas.line(self.left, y, self.left + self.width, y)
                self.canvas.text(self.left - 6, y + 4, number(value) + suffix, size=11, anchor="end")
        self.canvas.text(self.left, self.upper - 8, label, size=11)

    def x_tick(self, x: float, label: str) -> None:
        px, _ = self.at(x, 0)
        self.canvas.text(px, self.upper + self.height + 16, label, size=11, anchor="middle")

    def x_label(self, label: str) -> None:
        self.canvas.text(self.left + self.width / 2, self.upper + self.height + 34, label, size=11, anchor="middle")

    def stack(self, xs: Sequence[float], layers: Sequence[tuple[Sequence[float], str]]) -> None:
        """Areas on top of each other, the first one at the bottom."""
        base = [0.0] * len(xs)
        for values, colour in layers:
            upper = [b + v for b, v in zip(base, values, strict=True)]
            outline = [self.at(x, y) for x, y in zip(xs, upper, strict=True)]
            outline += [self.at(x, y) for x, y in zip(reversed(xs), reversed(base), strict=True)]
            self.canvas.polygon(outline, colour)
            base = upper


def grid_paths(rows: Sequence[Sequence[int]], cell: tuple[float, float], at: tuple[float, float]) -> dict[int, str]:
    """One path for each level, equal neighbours in a row joined: a picture of thousands of cells stays small."""
    (w, h), (left, upper) = cell, at
    paths: dict[int, list[str]] = {}
    for r, row in enumerate(rows):
        start = 0
        for c in range(1, len(row) + 1):
            if c == len(row) or row[c] != row[start]:
                x, y, length = left + start * w, upper + r * h, (c - start) * w
                paths.setdefault(row[start], []).append(f"M{x:.4g} {y:.4g}h{length:.4g}v{h - 1:.4g}h-{length:.4g}z")
                start = c
    return {level: "".join(parts) for level, parts in paths.items()}
