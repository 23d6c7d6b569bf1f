"""Numbers of a bench: as plain data for JSON, and as tables for a terminal."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from chatsvc import __version__
from chatsvc.bench.compare import Comparison
from chatsvc.bench.drive import Run
from chatsvc.bench.limits import Limits
from chatsvc.bench.waste import Waste
from chatsvc.config import usable_cpus, usable_memory

SCHEMA = 1


def percentile(values: Iterable[float], p: float) -> float | None:
    """Linear between the nearest ranks; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    at = (len(ordered) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def machine_facts() -> dict[str, Any]:
    """What the numbers were measured on. ``load_average`` (1 minute) tells whether the machine was quiet."""
    model = None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
    except OSError:
        pass
    return {
        "cores": usable_cpus(),
        "cpu": model or platform.processor() or None,
        "architecture": platform.machine(),
        "memory_bytes": usable_memory(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def run_facts(run: Run) -> dict[str, Any]:
    """One mode on one workload. Seconds, tokens, slots; slot numbers are means over time."""
    r, stats = run.recorder, run.stats
    timings = list(r.timings.values())
    wall = r.wall
    output = sum(t.tokens for t in timings)
    ttft = [t.ttft for t in timings if t.ttft is not None]
    tpot = [t.tpot for t in timings if t.tpot is not None]
    return {
        "workload": run.workload.name,
        "mode": run.mode.name,
        "requests": len(timings),
        "seconds": wall,
        "steps": r.steps,
        "prompt_tokens": sum(t.prompt for t in timings),
        "output_tokens": output,
        "tokens_per_second": output / wall if wall else None,
        "ttft_p50": percentile(ttft, 50),
        "ttft_p95": percentile(ttft, 95),
        "tpot_p50": percentile(tpot, 50),
        "tpot_p95": percentile(tpot, 95),
        "slots_reserved": r.slots.reserved / r.busy if r.busy else 0.0,
        "slots_used": r.slots.used / r.busy if r.busy else 0.0,
        "waste": r.slots.waste,
        "peak_concurrent": r.peak_running,
        "mean_concurrent": r.running_seconds / r.busy if r.busy else 0.0,
        "preemptions": stats.preemptions,
        "evictions": run.evictions,
        "computed_tokens": stats.computed_tokens,
        "cached_tokens": stats.cached_prompt_tokens,
    }


def document(
    *,
    model: str,
    settings: dict[str, Any],
    runs: Sequence[dict[str, Any]] = (),
    comparisons: Sequence[Comparison] = (),
    limits: Limits | None = None,
    waste: Sequence[Waste] = (),
) -> dict[str, Any]:
    """The JSON file."""
    return {
        "schema": SCHEMA,
        "chatsvc": __version__,
        "machine": machine_facts(),
        "model": model,
        "settings": settings,
        "limits": asdict(limits) if limits else None,
        "runs": list(runs),
        "comparisons": [asdict(c) for c in comparisons],
        "waste": [asdict(w) for w in waste],
    }


# -- tables ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text: the first two columns left, the others right."""
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(head))]
    lines = []
    for line in [head, *rows]:
        cells = [c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _ms(seconds: float | None, digits: int = 0) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.{digits}f}"


def _percent(x: float) -> str:
    return f"{100 * x:.1f}%"


HEAD = (
    *("workload", "mode", "req", "tok/s", "TTFT p50", "p95", "TPOT p50", "p95"),
    *("reserved", "used", "waste", "at once", "preempt", "computed", "cached", "s"),
)


def run_table(runs: Sequence[dict[str, Any]]) -> str:
    """TTFT and TPOT in milliseconds; reserved and used in KV slots, mean over time; at once: peak of requests."""
    rows = []
    for r in runs:
        rate = r["tokens_per_second"]
        rows.append(
            (
                *(r["workload"], r["mode"], str(r["requests"]), "-" if rate is None else f"{rate:.1f}"),
                *(_ms(r["ttft_p50"]), _ms(r["ttft_p95"]), _ms(r["tpot_p50"], 1), _ms(r["tpot_p95"], 1)),
                *(f"{r['slots_reserved']:.0f}", f"{r['slots_used']:.0f}", _percent(r["waste"])),
                *(str(r["peak_concurrent"]), str(r["preemptions"]), str(r["computed_tokens"])),
                *(str(r["cached_tokens"]), f"{r['seconds']:.1f}"),
            )
        )
    return table(HEAD, rows)


def comparison_lines(comparisons: Sequence[Comparison]) -> str:
    equal, ties = sum(c.equal for c in comparisons), sum(c.ties for c in comparisons)
    follow = sum(c.follow_ups for c in comparisons)
    wrong = [f"  {c.workload}, {c.mode}: {m}" for c in comparisons for m in c.mismatches]
    line = f"Greedy tokens against {comparisons[0].reference}: {equal} answers equal, {ties} part at a tie"
    line += f" ({follow} later turns of those chats not compared), {len(wrong)} mismatches"
    return "\n".join([line, *wrong])


def limits_lines(limits: Limits) -> str:
    lines = [
        f"Machine: reads {limits.read_bytes_per_second / 1e9:.1f} GB/s, multiplies {limits.flops_per_second / 1e9:.0f} "
        "GFLOP/s (best of several)"
    ]
    for d in limits.decode:
        lines.append(
            f"Decode step, batch {d.batch}, context {d.context}: {_ms(d.seconds, 1)} ms; the limit is "
            f"{_ms(d.limit_seconds, 1)} ms ({d.bound}): {100 * d.share:.0f}% of it reached"
        )
    return "\n".join(lines)


def waste_table(rows: Sequence[Waste]) -> str:
    head = ("block size", "", "sequences", "waste", "own tables", "of 500+", "waste", "own tables")
    return table(
        head,
        [
            (
                *(str(w.block_size), "", str(w.sequences), _percent(w.all), _percent(w.all_own)),
                *(str(w.long_sequences), _percent(w.long), _percent(w.long_own)),
            )
            for w in rows
        ],
    )
