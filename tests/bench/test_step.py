"""The parts of a step: what is counted, and that a bench of them comes to an end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatsvc.bench.step import StepBenchFailed, Stopwatch, measure
from chatsvc.cli.bench import command
from chatsvc.config import ServeConfig

FAST = {"simulated_step_ms": 5.0, "simulated_token_ms": 0.01, "num_kv_blocks": 2000}


class Worker:
    def work(self, seconds: float, *, fail: bool = False) -> str:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
        if fail:
            raise ValueError
        return "done"

    def wait(self) -> None:
        time.sleep(0.05)


def test_a_stopwatch_counts_the_threads_own_time() -> None:
    watch, worker = Stopwatch(), Worker()
    watch.on(worker, "work", "a")
    watch.on(worker, "wait", "b")
    assert worker.work(0.02) == "done"
    with pytest.raises(ValueError):
        worker.work(0.01, fail=True)
    worker.wait()
    assert watch.calls == {"a": 2, "b": 1}
    assert watch.seconds["a"] >= 0.03 and watch.seconds["b"] < 0.04


async def test_streams_that_end_are_no_measurement(make_rig: Callable[..., object]) -> None:
    config = ServeConfig.of(executor="simulated", **{**FAST, "num_kv_blocks": 20, "simulated_step_ms": 0.1})
    with pytest.raises(StepBenchFailed, match="streams ended"):
        await measure(config, 2, 3.0)


def test_the_command_tells_each_part(make_rig: Callable[..., object], tmp_path: Path) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in FAST.items()]
    path = tmp_path / "step.json"
    run = ["step", "--executor=simulated", *flags, "--streams=3", "--seconds=0.5", f"--json={path}"]
    done = CliRunner().invoke(command, run)
    assert done.exit_code == 0, done.output
    (parts,) = json.loads(path.read_text())
    assert parts["streams"] == 3 and parts["steps"] > 0 and parts["step_ms"] >= 5
    assert parts["native"] == parts["inputs"] == parts["sample"] == 0  # a simulated step has no such parts
    for name in ("schedule", "update", "publish", "serve"):
        assert parts[name] > 0
    host = parts["schedule"] + parts["update"]
    assert f"{host:8.3f} ms" in done.output.splitlines()[-3]
