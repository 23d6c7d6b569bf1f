"""``chatsvc bench burst``."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import Any

import click

from chatsvc.bench.burst import ANSWER, FIT, MODES, PROMPT, burst
from chatsvc.cli.options import given, options_of
from chatsvc.config import ServeConfig


@click.command("burst")
@click.option("--requests", type=click.IntRange(min=1), default=64, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False), help="write the numbers there, too")
@options_of(ServeConfig, only=("model", "dtype", "threads", "block_size", "attention_backend"))
def command(requests: int, path: str | None, **values: Any) -> None:
    """A burst of requests against a pool that holds six of them: recompute, swap and auto beside each other."""
    config = ServeConfig.of(**given(values))
    click.echo(f"{requests} requests of {PROMPT} + {ANSWER} tokens, pool for {FIT}")
    click.echo("mode       seconds  tok/s  recomputed  swapped  blocks out/in  computed tokens  equal answers")
    first: list[list[int]] = []
    results = []
    for mode in MODES:
        r = asyncio.run(burst(config, mode, requests, first))
        results.append(asdict(r))
        moved = f"{r.blocks_out}/{r.blocks_in}"
        click.echo(
            f"{r.mode:9} {r.seconds:8.2f} {requests * ANSWER / r.seconds:6.1f} {r.recomputed:11} {r.swapped:8} "
            f"{moved:>14} {r.computed_tokens:16} {r.equal:10} of {requests}"
        )
    if path:
        with open(path, "w") as f:
            json.dump(results, f, indent=1)
