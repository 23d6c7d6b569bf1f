"""``chatsvc simulate``: the engine's scheduler and block manager on a modelled GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import click

from chatsvc.sim import modes, plots, tracefile
from chatsvc.sim.literature import compare
from chatsvc.sim.scenarios import SCENARIOS
from chatsvc.sim.section import Section
from chatsvc.sim.service import ServiceStudy
from chatsvc.sim.study import Study
from chatsvc.sim.traces import MEANS, multi_turn, single_turns

PARTS = ("kv", "fit", "saturated", "block-sizes", "latency", "tenants", "swap", "preemption", "policies", "eviction")


def _env(name: str) -> str:
    return f"CHATSVC_{name}"


@click.command()
@click.option("--scenario", type=click.Choice(list(SCENARIOS)), envvar=_env("SCENARIO"), help="only this model and GPU")
@click.option("--only", multiple=True, type=click.Choice(PARTS), envvar=_env("ONLY"), help="only these parts")
@click.option("--seed", default=0, show_default=True, envvar=_env("SEED"))
@click.option(
    "--scale", default=1.0, show_default=True, envvar=_env("SCALE"), help="how much is simulated: more is steadier"
)
@click.option(
    "--trace", type=click.Path(path_type=Path), envvar=_env("TRACE"), help="replay a recorded trace (JSON lines)"
)
@click.option(
    "--write-trace",
    type=click.Path(path_type=Path),
    envvar=_env("WRITE_TRACE"),
    help="write a synthetic trace and stop",
)
@click.option(
    "--kind",
    type=click.Choice([*MEANS, "multi-turn"]),
    default="sharegpt",
    show_default=True,
    envvar=_env("KIND"),
    help="of the trace to write",
)
@click.option("--requests", default=1000, show_default=True, envvar=_env("REQUESTS"), help="of the trace to write")
@click.option("--rate", default=8.0, show_default=True, envvar=_env("RATE"), help="its requests (or chats) per second")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), envvar=_env("JSON"), help="write all numbers there, too"
)
@click.option(
    "--plots", "plots_dir", type=click.Path(path_type=Path), envvar=_env("PLOTS"), help="write SVG pictures there"
)
def command(
    scenario: str | None,
    only: tuple[str, ...],
    seed: int,
    scale: float,
    trace: Path | None,
    write_trace: Path | None,
    kind: str,
    requests: int,
    rate: float,
    json_file: Path | None,
    plots_dir: Path | None,
) -> None:
    """Run the engine's own scheduler and block manager, unmodified, on a roofline model of a GPU.

    Nothing sleeps: time is the model's. The same seed gives the same numbers. docs/paging.md says what is assumed.
    """
    if not (scale > 0 and rate > 0 and requests > 0):
        raise click.UsageError("--scale, --rate and --requests must be above 0")
    if write_trace is not None:
        made = multi_turn(requests, rate, seed) if kind == "multi-turn" else single_turns(kind, requests, rate, seed)
        tracefile.write(write_trace, made)
        click.echo(f"{len(made)} requests written to {write_trace}")
        return
    began = time.perf_counter()
    study, users = Study(seed, scale), ServiceStudy(seed, scale)
    if trace is not None:
        which = (modes.DYNAMIC, modes.MAX, modes.PAGED, modes.SHARED)
        sections = [users.replay(SCENARIOS[scenario or "llama-2-7b"], tracefile.read(trace), which)]
        sections[0].print()
    else:
        sections = _study(study, users, scenario, only or PARTS)
    click.echo(f"\n{time.perf_counter() - began:.0f} s, seed {seed}, scale {scale:g}")
    if json_file is not None:
        numbers = {"seed": seed, "scale": scale, "sections": {s.name: s.as_json() for s in sections}}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        click.echo(f"numbers: {json_file}")
    if plots_dir is not None:
        saturated = [s for s in sections if s.name.startswith("saturated/")]
        sizes = next((s for s in sections if s.name == "block_sizes"), None)
        for path in plots.write_all(plots_dir, SCENARIOS[scenario or "llama-2-7b"], seed, sizes, saturated):
            click.echo(f"picture: {path}")


def _study(study: Study, users: ServiceStudy, scenario: str | None, parts: tuple[str, ...]) -> list[Section]:
    """Run the parts that were asked for and print each as soon as it is there."""
    one = SCENARIOS[scenario or "llama-2-7b"]
    sections: list[Section] = []

    def show(part: str, make: Callable[[], Section]) -> None:
        if part in parts:
            sections.append(make())
            sections[-1].print()

    show("kv", study.kv)
    show("fit", study.fits)
    show("saturated", lambda: study.saturated(one, "sharegpt", modes.MODES))
    show("saturated", lambda: study.saturated(one, "alpaca", modes.BRIEF))
    if scenario is None:
        show("saturated", lambda: study.saturated(SCENARIOS["llama-3-70b"], "sharegpt", modes.BRIEF))
        show("saturated", lambda: study.saturated(SCENARIOS["opt-13b"], "sharegpt", modes.PAPER))
    show("block-sizes", lambda: study.block_sizes(one))
    show("latency", lambda: users.latency(one))
    show("tenants", lambda: users.tenants(one))
    show("swap", study.swap)
    show("preemption", lambda: study.preemption(one))
    show("policies", lambda: users.policies(one))
    show("policies", lambda: users.prefill_share(one))
    show("eviction", lambda: study.eviction(one))
    literature = compare({s.name: s for s in sections})
    if literature.rows:
        sections.append(literature)
        literature.print()
    return sections
