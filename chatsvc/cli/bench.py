"""``chatsvc bench``: this engine against its own baseline modes."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import click

from chatsvc.bench import report, trace
from chatsvc.bench.baselines import MODES
from chatsvc.bench.compare import Comparison, compare
from chatsvc.bench.drive import Run, drive
from chatsvc.bench.limits import Limits, measure
from chatsvc.bench.rig import Rig
from chatsvc.bench.waste import waste
from chatsvc.cli import (
    bench_allocator,
    bench_beside,
    bench_burst,
    bench_curves,
    bench_perplexity,
    bench_readers,
    bench_step,
)
from chatsvc.cli.options import GroupedCommand, GroupedOption, given, options_of
from chatsvc.config import ServeConfig
from chatsvc.errors import ConfigError
from chatsvc.models.loader import load_config

F = TypeVar("F", bound=Callable[..., Any])

# A pool that is small beside max_model_len: what the modes do with memory is what is compared.
POOL_TOKENS = 4096
MAX_MODEL_LEN = 2048
# A chat of the waste trace never has to wait for memory: every sequence is seen for its whole life.
WASTE_POOL_TOKENS = 32768
# Like the default model on two cores.
STEP_MS, TOKEN_MS = 25.0, 2.5

# (share of the sessions, of the answers' length) that makes the whole default bench a matter of minutes on two cores.
DEFAULT = {
    "mixed": (0.16, 0.4),
    "shared-prefix": (0.125, 0.25),
    "decode-heavy": (1.0, 0.1875),
    "multi-turn": (0.25, 0.25),
    "single": (0.2, 0.1875),
    "long-prefill": (0.17, 0.5),
}
QUICK = {"mixed": (0.0625, 0.25), "shared-prefix": (0.0625, 0.25), "decode-heavy": (0.5, 0.125)}

_SHARED = (
    *("model", "dtype", "threads", "chat_template", "max_model_len", "block_size", "kv_cache_memory", "num_kv_blocks"),
    *("max_num_seqs", "max_num_batched_tokens", "max_step_ms", "executor", "simulated_step_ms", "simulated_token_ms"),
    *("attention_backend", "quantization", "kv_cache_dtype"),
)


@dataclass(frozen=True)
class Plan:
    """What was asked for. ``scale`` and ``answers`` replace the workloads' own shares."""

    modes: tuple[str, ...]
    workloads: tuple[str, ...]
    quick: bool
    seed: int
    scale: float | None
    answers: float | None
    repeat: int = 1

    def workload(self, name: str) -> trace.Workload:
        scale, answers = (QUICK if self.quick else DEFAULT).get(name, DEFAULT[name])
        return trace.build(
            name,
            self.seed,
            scale if self.scale is None else self.scale,
            answers if self.answers is None else self.answers,
        )


@dataclass
class Outcome:
    runs: list[dict[str, Any]] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    limits: Limits | None = None


def _bench(*flags: str, **kw: Any) -> Callable[[F], F]:
    return click.option(*flags, cls=GroupedOption, group="Bench", **kw)


class BenchGroup(GroupedCommand, click.Group):
    """The bench itself, and further ones by name."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


@click.group("bench", cls=BenchGroup, invoke_without_command=True, context_settings={"max_content_width": 120})
@_bench("--mode", "modes", multiple=True, type=click.Choice([m.name for m in MODES]), help="one or several [all]")
@_bench("--workload", "workloads", multiple=True, type=click.Choice(trace.NAMES), help="one or several [all]")
@_bench("--quick", is_flag=True, help="smaller workloads; without --workload: mixed, shared-prefix, decode-heavy")
@_bench("--scale", type=click.FloatRange(0, min_open=True), help="share of each workload's sessions (1: all of them)")
@_bench("--answers", type=click.FloatRange(0, min_open=True), help="share of each answer's length (1: as recorded)")
@_bench("--repeat", type=click.IntRange(1), default=1, help="rounds over all modes; each mode's fastest is shown [1]")
@_bench("--seed", "trace_seed", type=int, default=1, help="of the recorded chats [1]")
@_bench("--limits/--no-limits", default=True, help="measure the machine's own limits too [on]")
@_bench("--waste", "only_waste", is_flag=True, help="only the waste of KV slots on the whole mixed trace, simulated")
@_bench("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="write all numbers there")
@options_of(ServeConfig, only=_SHARED)
@click.pass_context
def command(
    context: click.Context,
    /,
    modes: tuple[str, ...],
    workloads: tuple[str, ...],
    quick: bool,
    scale: float | None,
    answers: float | None,
    repeat: int,
    trace_seed: int,
    limits: bool,
    only_waste: bool,
    json_file: Path | None,
    **values: Any,
) -> None:
    """Compare this engine with its own baseline modes on the same weights: speed, waiting, KV memory.

    Without options it takes some minutes on two cores; --executor simulated needs no weights and no time.
    """
    if context.invoked_subcommand is not None:
        return
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    config = _config(given(values), waste_only=only_waste)
    if only_waste:
        document, faults = _waste(config, trace_seed, scale or 1.0), 0
    else:
        names = workloads or (tuple(QUICK) if quick else trace.NAMES)
        plan = Plan(modes or tuple(m.name for m in MODES), names, quick, trace_seed, scale, answers, repeat)
        document, faults = _compare(config, plan, limits)
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(document, indent=1) + "\n")
        except OSError as e:
            raise ConfigError(f"--json {json_file}: {e.strerror}") from e
    if faults:
        raise click.ClickException(f"{faults} answers differ between the modes and no tie explains it")


def _config(values: dict[str, Any], *, waste_only: bool) -> ServeConfig:
    own: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 32,
        "simulated_step_ms": STEP_MS,
        "simulated_token_ms": TOKEN_MS,
    }
    config = ServeConfig.of(**{**own, **values})
    if config.num_kv_blocks is None and config.kv_cache_memory is None:
        tokens = WASTE_POOL_TOKENS if waste_only else POOL_TOKENS
        config = config.model_copy(update={"num_kv_blocks": tokens // config.block_size})
    return config


def _settings(config: ServeConfig, **more: Any) -> dict[str, Any]:
    shown = (n for n in _SHARED if n not in ("model", "kv_cache_memory", "chat_template"))
    return {**{n: getattr(config, n) for n in shown}, **more}


def _waste(config: ServeConfig, seed: int, scale: float) -> dict[str, Any]:
    tokens = (config.num_kv_blocks or 0) * config.block_size or WASTE_POOL_TOKENS
    rows = asyncio.run(waste(config, tokens, seed, scale))
    click.echo(f"KV slots reserved and not used, over the whole mixed trace (seed {seed}), weighted by time:")
    click.echo(report.waste_table(rows))
    click.echo("waste: a block that several sequences share counts once; own tables: as if nothing were shared")
    settings = _settings(config, pool_tokens=tokens, seed=seed, scale=scale)
    return report.document(model=config.model, settings=settings, waste=rows)


def _compare(config: ServeConfig, plan: Plan, limits: bool) -> tuple[dict[str, Any], int]:
    rig = Rig(config)
    try:
        outcome = asyncio.run(_run(rig, plan))
        if limits and rig.local is not None and rig.local.runner is not None:
            outcome.limits = measure(rig.local.runner, load_config(rig.files))
        settings = _settings(
            config,
            step_tokens=rig.budget,
            pool_tokens=rig.capacity.num_blocks * config.block_size,
            sequence_tokens=rig.limit,
            seed=plan.seed,
            repeat=plan.repeat,
        )
        name = rig.files.name
    finally:
        rig.close()
    document = report.document(
        model=name,
        settings=settings,
        runs=outcome.runs,
        comparisons=outcome.comparisons,
        limits=outcome.limits,
    )
    _print(document, outcome)
    return document, sum(len(c.mismatches) for c in outcome.comparisons)


async def _run(rig: Rig, plan: Plan) -> Outcome:
    outcome = Outcome()
    modes = [m for m in MODES if m.name in plan.modes]
    await drive(rig, trace.build("decode-heavy", 0, 0.125, 0.05), modes[-1])  # pays for lazy initialisation
    for name in plan.workloads:
        workload = plan.workload(name)
        best: dict[str, Run] = {}
        for _ in range(plan.repeat):  # a busy moment of the machine meets one round, not one mode
            for mode in modes:
                began = time.perf_counter()
                run = await drive(rig, workload, mode)
                click.echo(f"{name}, {mode.name}: {time.perf_counter() - began:.1f} s", err=True)
                if mode.name not in best or run.recorder.wall < best[mode.name].recorder.wall:
                    best[mode.name] = run
        runs = [best[m.name] for m in modes]
        outcome.runs += [report.run_facts(run) for run in runs]
        outcome.comparisons += [await compare(rig, run, runs[-1]) for run in runs[:-1]]
    return outcome


def _print(document: dict[str, Any], outcome: Outcome) -> None:
    machine, settings = document["machine"], document["settings"]
    time_is = "modelled, nothing was computed" if settings["executor"] == "simulated" else "measured"
    click.echo(
        f"{document['model']} on {machine['cores']} cores ({machine['cpu']}), torch {machine['torch']}, "
        f"{machine['threads']} threads, load average {machine['load_average']}\n"
        f"KV pool {settings['pool_tokens']} tokens in blocks of {settings['block_size']}, up to "
        f"{settings['sequence_tokens']} tokens a sequence, {settings['step_tokens']} tokens a step; time is {time_is}\n"
    )
    click.echo(report.run_table(outcome.runs))
    click.echo("\nTTFT, TPOT: ms. reserved, used: KV slots, mean over time. at once: most requests that ran together.")
    if outcome.comparisons:
        click.echo(report.comparison_lines(outcome.comparisons))
    if outcome.limits is not None:
        click.echo(report.limits_lines(outcome.limits))


command.add_command(bench_allocator.command)
command.add_command(bench_burst.command)
command.add_command(bench_perplexity.command)
command.add_command(bench_readers.command)
command.add_command(bench_curves.command)
command.add_command(bench_step.command)
command.add_command(bench_beside.command)
