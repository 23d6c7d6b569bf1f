"""``chatsvc bench curves``."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from chatsvc.bench.curves import AT_BATCH, AT_CONTEXT, SHARED, Point, measure, points
from chatsvc.cli.options import given, options_of
from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError
from chatsvc.runtime.local import LocalExecutor
from chatsvc.sim.svg import Canvas, Frame, ticks

COLOURS = ("#4292c6", "#b2182b")


@click.command("curves")
@click.option("--tries", type=click.IntRange(min=1), default=5, show_default=True, help="steps a point")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write the numbers there")
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="write a picture (SVG) there"
)
@options_of(
    ServeConfig,
    only=(
        *("model", "dtype", "quantization", "kv_cache_dtype", "threads", "block_size", "kv_cache_memory"),
        "attention_backend",
    ),
)
def command(tries: int, json_file: Path | None, plot_file: Path | None, **values: Any) -> None:
    """What a decode step costs as the batch and the context grow, with and without a shared prefix."""
    config = ServeConfig.of(**given(values))
    built = build(config)
    executor = built.engine.executor
    if not isinstance(executor, LocalExecutor):
        raise ConfigError("the curves are measured on a model")
    capacity = executor.start()
    try:
        found = measure(executor, list(points(capacity.max_model_len)), tries)
        backend = executor.runner.backend.name if executor.runner is not None else ""
    finally:
        executor.stop()
    title = f"{built.files.name}, {config.quantization}, attention {backend}, {os.cpu_count()} cores"
    click.echo(f"{title}, load average {os.getloadavg()[0]:.1f}; decode steps, median of {tries}")
    click.echo("batch  context  shared  step ms  tokens/s")
    for p in found:
        click.echo(f"{p.batch:5} {p.context:8} {p.shared:7} {p.seconds * 1e3:8.1f} {p.tokens_per_second:9.1f}")
    try:
        if json_file is not None:
            json_file.write_text(json.dumps([asdict(p) for p in found], indent=1) + "\n")
        if plot_file is not None:
            plot_file.write_text(picture(title, found))
    except OSError as e:
        raise ConfigError(f"{e.filename}: {e.strerror}") from e


def picture(title: str, found: Sequence[Point]) -> str:
    """Two panels: tokens/s against the batch, and against the context."""
    canvas = Canvas(860, 330)
    canvas.text(20, 24, f"Decode: {title}", size=14, bold=True)
    names = ("nothing shared", f"{SHARED:.0%} of the context shared")
    canvas.legend(20, 46, list(zip(names, COLOURS, strict=True)))
    by_batch = [p for p in found if p.context == AT_CONTEXT]
    by_context = [p for p in found if p.batch == AT_BATCH]
    _panel(canvas, 60, by_batch, "batch", f"tokens/s at a context of {AT_CONTEXT}")
    _panel(canvas, 490, by_context, "context", f"tokens/s at batch {AT_BATCH}")
    return canvas.render()


def _panel(canvas: Canvas, left: float, found: Sequence[Point], axis: str, label: str) -> None:
    if not found:
        return
    xs = sorted({getattr(p, axis) for p in found})
    top = ticks(max(p.tokens_per_second for p in found))[-1]
    frame = Frame(canvas, left, 80, 340, 190, math.log2(xs[0]), math.log2(xs[-1]), top)
    frame.y_axis(label)
    for x in xs:
        frame.x_tick(math.log2(x), str(x))
    frame.x_label(axis if axis == "batch" else "context, tokens")
    for shares, colour in ((False, COLOURS[0]), (True, COLOURS[1])):
        line = sorted((getattr(p, axis), p.tokens_per_second) for p in found if (p.shared > 0) == shares)
        canvas.polyline([frame.at(math.log2(x), y) for x, y in line], colour)
