"""The allocator bench runs and counts what it says; how fast anything is, no test decides."""

from __future__ import annotations

import json

from click.testing import CliRunner

from chatsvc.bench import allocator
from chatsvc.cli.bench import command


def test_rows_for_every_size(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(allocator, "POOL_SIZES", (50, 300))
    monkeypatch.setattr(allocator, "QUEUE_SIZES", (20, 60))
    monkeypatch.setattr(allocator, "RUNNING", (1, 5))
    monkeypatch.setattr(allocator, "WAITING", 40)
    path = tmp_path / "n.json"
    result = CliRunner().invoke(command, ["allocator", "--json", str(path)], catch_exceptions=False)
    assert result.exit_code == 0
    numbers = json.loads(path.read_text())
    assert [r["blocks"] for r in numbers["pool"]] == [50, 300]
    assert [r["waiting"] for r in numbers["queue"]] == [20, 60]
    assert [r["running"] for r in numbers["step"]] == [1, 5]
    assert all(v >= 0 for rows in numbers.values() for r in rows for v in r.values())


def test_the_bench_is_still_a_command_of_its_own() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert "--workload" in result.output and "allocator" in result.output
