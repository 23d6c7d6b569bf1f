"""``chatsvc bench step``: where the time of a decode step goes."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from chatsvc.bench.step import StepParts, measure
from chatsvc.cli.options import given, options_of
from chatsvc.config import ServeConfig

_NAMES = {
    "native": "engine's thread: the native call",
    "inputs": "engine's thread: inputs",
    "sample": "engine's thread: draw tokens",
    "schedule": "event loop: plan the step",
    "update": "event loop: apply its result",
    "publish": "event loop: tokens to text",
    "serve": "event loop: frames, sockets, HTTP",
}


@click.command("step")
@click.option("--streams", "counts", multiple=True, type=click.IntRange(min=1), default=(16,), show_default=True)
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True, help="that are measured")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write the numbers there")
@options_of(
    ServeConfig,
    only=(
        *("model", "quantization", "kv_cache_dtype", "threads", "num_kv_blocks", "attention_backend"),
        *("executor", "simulated_step_ms", "simulated_token_ms", "steps_in_flight"),
    ),
)
def command(counts: tuple[int, ...], seconds: float, json_file: Path | None, **values: Any) -> None:
    """Where the processor time of a decode step goes, while so many streams are read."""
    found = []
    for streams in counts:
        config = ServeConfig.of(**given(values), max_num_seqs=max(counts))
        parts = asyncio.run(measure(config, streams, seconds))
        found.append(parts)
        show(parts)
    click.echo(f"\nCPU time of the thread that does it, for each step; {os.cpu_count()} cores")
    if json_file is not None:
        json_file.write_text(json.dumps([asdict(p) for p in found], indent=1) + "\n", encoding="utf-8")


def show(p: StepParts) -> None:
    thread = p.native + p.inputs + p.sample
    click.echo(f"\n{p.streams} streams, {p.steps} steps, {p.step_ms:.2f} ms each by the clock on the wall")
    step = thread or p.step_ms
    for name, label in _NAMES.items():
        ms = getattr(p, name)
        if thread or not label.startswith("engine"):
            click.echo(f"  {label:36} {ms:8.3f} ms {ms / step:6.1%}")
    host = p.schedule + p.inputs + p.update
    click.echo(f"  {'plan, inputs and result together':36} {host:8.3f} ms {host / step:6.1%}")
