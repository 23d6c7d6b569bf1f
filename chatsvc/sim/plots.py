"""The pictures of ``docs/paging.md``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from chatsvc.sim import blockmap, modes
from chatsvc.sim.cost import Scenario
from chatsvc.sim.driver import Run
from chatsvc.sim.memory import Sample
from chatsvc.sim.modes import make_driver
from chatsvc.sim.section import Section
from chatsvc.sim.svg import Canvas, Frame, grid_paths, ticks
from chatsvc.sim.traces import single_turns

PARTS = (
    ("tokens", "K/V of tokens", "#4292c6"),
    ("future", "reserved for later", "#fdd49e"),
    ("internal", "internal", "#f4a582"),
    ("external", "external", "#b2182b"),
)
COLOURS = ("#4292c6", "#08519c", "#f4a582", "#b2182b")
MAX_POINTS = 160


def _thin(samples: Sequence[Sample]) -> list[Sample]:
    step = max(1, math.ceil(len(samples) / MAX_POINTS))
    return [*samples[::step], samples[-1]] if samples else []


def memory_over_time(runs: Sequence[tuple[str, Run]]) -> str:
    """Stacked areas, one panel for each run: what the pool holds while it fills, is full and empties again."""
    width, panel = 860, 210
    canvas = Canvas(width, 60 + panel * len(runs))
    canvas.text(20, 24, "KV memory over time", size=15, bold=True)
    canvas.legend(20, 46, [(text, colour) for _, text, colour in PARTS] + [("free", "#f6f8fa")])
    end = max(run.samples[-1].time for _, run in runs if run.samples)
    for i, (title, run) in enumerate(runs):
        samples = _thin(run.samples)
        pool = samples[0].split.pool
        frame = Frame(canvas, 60, 88 + i * panel, width - 90, panel - 70, 0.0, end, 100.0)
        canvas.rect(frame.left, frame.upper, frame.width, frame.height, "#f6f8fa")
        frame.stack(
            [s.time for s in samples],
            [([100 * getattr(s.split, key) / pool for s in samples], colour) for key, _, colour in PARTS],
        )
        most = max(s.running for s in samples)
        frame.y_axis(f"{title}: at most {most} running, done after {run.seconds:.0f} s", "%")
        for t in ticks(end, 8):
            if t <= end:
                frame.x_tick(t, f"{t:g} s")
    return canvas.render()


def blocks(seed: int, steps: int = 320) -> str:
    """Each row a block, each column a step."""
    maps = [(mode, blockmap.watch(mode, steps, seed)) for mode in blockmap.PAIR]
    cell_w, cell_h, left = 2.5, 4.0, 40.0
    panel = blockmap.BLOCKS * cell_h + 46
    canvas = Canvas(int(left + steps * cell_w + 24), int(66 + panel * len(maps)))
    canvas.text(20, 24, f"{blockmap.BLOCKS} blocks of {blockmap.BLOCK_SIZE} tokens, step by step", size=15, bold=True)
    canvas.legend(20, 46, list(blockmap.LEVELS.values()))
    for i, (mode, made) in enumerate(maps):
        upper = 86 + i * panel
        mean = sum(made.running) / max(1, len(made.running))
        canvas.text(left, upper - 8, f"{mode.name}: {mean:.1f} running on average", size=11)
        rows = list(zip(*made.columns, strict=True))
        for level, path in sorted(grid_paths(rows, (cell_w, cell_h), (left, upper)).items()):
            canvas.path(path, blockmap.LEVELS[level][1])
        canvas.text(left - 6, upper + 10, "block", size=10, anchor="end")
    canvas.text(canvas.width - 24, canvas.height - 8, "step", size=10, anchor="end")
    return canvas.render()


def waste_by_block_size(section: Section) -> str:
    """Lines: waste (left) over block size, for both traces."""
    lines = (
        ("sharegpt_waste", "ShareGPT, all"),
        ("long_waste", "ShareGPT, 500 tokens or more"),
        ("alpaca_waste", "Alpaca"),
    )
    sizes = [int(row["block_size"] or 0) for row in section.rows]
    top = ticks(max(100 * float(row[k] or 0) for row in section.rows for k, _ in lines))[-1]
    canvas = Canvas(640, 360)
    canvas.text(20, 24, "Waste by block size (paged)", size=15, bold=True)
    canvas.legend(20, 46, [(text, colour) for (_, text), colour in zip(lines, COLOURS)] + [("4 %", "#57606a")])
    frame = Frame(canvas, 60, 84, 550, 210, math.log2(sizes[0]), math.log2(sizes[-1]), top)
    frame.y_axis("of the slots held", "%")
    for size in sizes:
        frame.x_tick(math.log2(size), str(size))
    frame.x_label("tokens per block")
    limit = [frame.at(frame.x0, 4.0), frame.at(frame.x1, 4.0)]
    canvas.line(*limit[0], *limit[1], stroke="#57606a")
    for (key, _), colour in zip(lines, COLOURS):
        points = [(math.log2(s), 100 * float(row[key] or 0)) for s, row in zip(sizes, section.rows, strict=True)]
        canvas.polyline([frame.at(x, y) for x, y in points], colour)
    return canvas.render()


def throughput(sections: Sequence[Section]) -> str:
    """Bars: tokens per second by mode, one panel for each scenario and trace."""
    bar, width = 22, 760
    heights = [40 + bar * len(s.rows) for s in sections]
    canvas = Canvas(width, 40 + sum(heights))
    canvas.text(20, 24, "Answer tokens per second, by mode", size=15, bold=True)
    y = 62.0
    for section, height in zip(sections, heights, strict=True):
        canvas.text(20, y, section.title.rsplit(",", 1)[0], size=12, bold=True)
        top = max(float(row["throughput"] or 0) for row in section.rows)
        for i, row in enumerate(section.rows):
            value, at = float(row["throughput"] or 0), y + 10 + i * bar
            canvas.text(212, at + 13, str(row["mode"]), size=11, anchor="end")
            canvas.rect(220, at + 2, 400 * value / top, bar - 7, COLOURS["paged" in str(row["mode"])])
            label = f"{value:,.0f}  (x{float(row['speedup'] or 0):.1f})"
            canvas.text(226 + 400 * value / top, at + 13, label, size=11)
        y += height
    return canvas.render()


def write_all(
    folder: Path, scenario: Scenario, seed: int, block_sizes: Section | None, saturated: Sequence[Section]
) -> list[Path]:
    """Write every picture there is data for; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = single_turns("sharegpt", 500, 50.0, seed)
    runs = [(mode.name, make_driver(scenario, mode).run(trace)) for mode in (modes.MAX_2048, modes.ORACLE, modes.PAGED)]
    pictures = {"memory-over-time.svg": memory_over_time(runs), "blocks.svg": blocks(seed)}
    if block_sizes is not None:
        pictures["waste-by-block-size.svg"] = waste_by_block_size(block_sizes)
    if saturated:
        pictures["throughput.svg"] = throughput(saturated)
    for name, text in pictures.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in pictures]
