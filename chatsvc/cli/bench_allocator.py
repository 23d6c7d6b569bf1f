"""``chatsvc bench allocator``: what the block pool and the scheduler cost, by size."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from chatsvc.bench import allocator


@click.command("allocator")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write all numbers there")
@click.option("--quick", is_flag=True, help="smaller sizes")
def command(json_file: Path | None, quick: bool) -> None:
    """Cost of an operation on pools and queues of several sizes (it should not grow), and of a step's bookkeeping."""
    click.echo("blocks in the pool: us to take one, give it back, evict a cached one, touch a cached one")
    pools = [allocator.pool_costs(n) for n in allocator.POOL_SIZES[: 2 if quick else None]]
    for p in pools:
        click.echo(f"{p.blocks:>9,} {p.take:8.2f} {p.give:8.2f} {p.evict:8.2f} {p.touch:8.2f}")
    click.echo("requests in the queue: us to add one, to abort one")
    queues = [allocator.queue_costs(n) for n in allocator.QUEUE_SIZES[: 2 if quick else None]]
    for q in queues:
        click.echo(f"{q.waiting:>9,} {q.add:8.2f} {q.abort:8.2f}")
    waiting = 100 if quick else allocator.WAITING
    click.echo(
        f"running sequences ({waiting:,} wait): ms of a step to plan, lay out its inputs, apply its result, in all"
    )
    steps = [allocator.step_costs(n, waiting) for n in allocator.RUNNING[: 2 if quick else None]]
    for s in steps:
        click.echo(f"{s.running:>9,} {s.schedule:8.3f} {s.inputs:8.3f} {s.update:8.3f} {s.total:8.3f}")
    click.echo("CPU time; detokenising and sending are no part of it")
    if json_file is not None:
        numbers: dict[str, list[allocator.PoolCosts] | list[allocator.QueueCosts] | list[allocator.StepCosts]]
        numbers = {"pool": pools, "queue": queues, "step": steps}
        document = {name: [asdict(row) for row in rows] for name, rows in numbers.items()}
        json_file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
