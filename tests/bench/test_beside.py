"""The bench of a busy API beside the steps counts what the server did, for both engines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import CliRunner

from chatsvc.cli.bench import command


def test_three_cases_of_each_engine(make_rig: Callable[..., object], tmp_path: Path) -> None:
    path = tmp_path / "n.json"
    run = ["beside", "--streams=2", "--asking=1", "--seconds=0.5", "--repeat=1", f"--json={path}"]
    done = CliRunner().invoke(command, [*run, "--executor", "simulated", "--simulated-step-ms", "20"])
    assert done.exit_code == 0, done.output
    cases = json.loads(path.read_text())
    assert [(c["engine"], c["streams"], c["asking"]) for c in cases] == [
        (engine, *kind) for engine in ("thread", "process") for kind in ((2, 0), (0, 1), (2, 1))
    ]
    for c in cases:
        # What the clock of the simulated step says, and no more tokens than it lets through.
        assert (c["step_ms"] >= 20) is bool(c["streams"])
        assert 0 < c["tokens"] <= 2 * 1000 / 20 + 8 if c["streams"] else c["tokens"] == 0
        assert (c["requests"] > 0) is bool(c["asking"]) and 0 <= c["p50"] <= c["p99"]
    assert len(done.output.splitlines()) == 7
