"""``chatsvc bench beside``: a busy API beside the engine's steps, engine in a thread against a process."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from statistics import median

import click

from chatsvc.bench.beside import Case, measure


@click.command("beside", context_settings={"ignore_unknown_options": True})
@click.option("--streams", type=click.IntRange(min=1), default=16, show_default=True, help="that decode")
@click.option("--asking", type=click.IntRange(min=1), default=2, show_default=True, help="connections that ask")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="of each case")
@click.option("--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="engines in turns; medians")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write the numbers there")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def command(
    streams: int, asking: int, seconds: float, repeat: int, json_file: Path | None, flags: tuple[str, ...]
) -> None:
    """What a busy API does to the engine's steps, and they to it. FLAGS are those of ``chatsvc serve``."""
    found: list[Case] = []
    for _ in range(repeat):
        for engine in ("thread", "process"):
            cases = measure(engine, flags, streams=streams, asking=asking, seconds=seconds)
            found += asyncio.run(cases)
    click.echo("engine   streams asking  step ms  tokens/s  requests/s  answer p50   p99 ms  loop lag ms")
    for engine in ("thread", "process"):
        for kind in ((streams, 0), (0, asking), (streams, asking)):
            same = [c for c in found if (c.engine, c.streams, c.asking) == (engine, *kind)]
            step, tokens, requests, p50, p99, lag = (
                median(getattr(c, name) for c in same)
                for name in ("step_ms", "tokens", "requests", "p50", "p99", "lag_ms")
            )
            click.echo(
                f"{engine:8} {kind[0]:7} {kind[1]:6} {step:8.2f} {tokens:9.1f} {requests:11.0f} {p50:11.2f} {p99:8.2f} "
                f"{lag:12.2f}"
            )
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(c) for c in found], indent=1) + "\n", encoding="utf-8")
