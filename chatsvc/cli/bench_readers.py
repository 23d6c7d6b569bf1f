"""``chatsvc bench readers``."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

import click

from chatsvc.bench.readers import run
from chatsvc.modelfiles import resolve
from chatsvc.runtime.clock import clock_tokens
from chatsvc.text.tokenizer import load_tokenizer


@click.command("readers")
@click.option("--readers", "counts", multiple=True, type=click.IntRange(min=1), default=(1000,), show_default=True)
@click.option(
    "--stop", "share", type=click.FloatRange(0, 1), default=0.1, show_default=True, help="share that stops reading"
)
@click.option(
    "--servers", type=click.IntRange(min=1), default=1, show_default=True, help="API processes that share them"
)
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(["thread", "process"]), default=("thread", "process")
)
@click.option("--rate", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="tokens a second of each")
@click.option("--seconds", type=click.FloatRange(min=1), default=20.0, show_default=True, help="that ages are counted")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="write the numbers there, too")
def command(
    counts: tuple[int, ...],
    share: float,
    servers: int,
    engines: tuple[str, ...],
    rate: float,
    seconds: float,
    path: str | None,
) -> None:
    """Many readers of streams, a share of which stops reading: tokens missing or doubled, age of text, CPU, memory."""
    tokenizer = load_tokenizer(resolve("smollm2-135m"))
    ids = clock_tokens(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.is_special)
    alphabet = {tokenizer.token_bytes(token): i for i, token in enumerate(ids)}
    click.echo("age of text: ms; cpu: cores, and us for a token that a reader got; memory: MiB of all server processes")
    click.echo(
        "readers stopped servers engine   tok/s frames/s  age p50   p99   max  api cpu    us engine    us client  "
        "memory     faults"
    )
    results = []
    for count in counts:
        for engine in engines:
            r = asyncio.run(
                run(
                    alphabet,
                    readers=count,
                    stopping=int(count * share),
                    servers=servers,
                    engine=engine,
                    rate=rate,
                    seconds=seconds,
                )
            )
            results.append(r)
            each = 1e6 * r.servers / max(1.0, r.rate * (r.readers - r.stopped))
            click.echo(
                f"{r.readers:7} {r.stopped:7} {r.servers:7} {r.engine:8} {r.rate:5.1f} {r.frames:8.1f} {r.p50:8.0f} "
                f"{r.p99:5.0f} {r.most:5.0f} {r.api_cpu:8.2f} {r.api_cpu * each:5.1f} {r.engine_cpu:6.2f} "
                f"{r.engine_cpu * each:5.1f} {r.client_cpu:6.2f} "
                f"{r.memory_before / 2**20:5.0f} {r.memory_after / 2**20:5.0f} {len(r.faults):6}"
            )
            for fault in r.faults:
                click.echo(f"        {fault}")
    if path:
        with open(path, "w") as f:
            json.dump([asdict(r) for r in results], f, indent=1)
    sys.exit(1 if any(r.faults for r in results) else 0)
