"""The step that the curves time is the step that they name; the picture shows every point."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatsvc.bench.curves import Point, plan_of, points
from chatsvc.cli.bench import command
from chatsvc.cli.bench_curves import picture


@pytest.mark.parametrize(("batch", "context", "shared"), [(1, 128, 0), (8, 512, 384), (3, 33, 16), (64, 512, 0)])
def test_a_plan_shares_exactly_the_common_blocks(batch: int, context: int, shared: int) -> None:
    plan = plan_of(batch, context, shared, 16)
    assert len(plan.rows) == batch and plan.num_tokens == batch
    tables = [row.block_table for row in plan.rows]
    assert all(len(t) == -(-context // 16) and 0 not in t for t in tables)
    common = set(tables[0]).intersection(*tables[1:]) if batch > 1 else set()
    assert len(common) == (shared // 16 if batch > 1 else 0)
    own = [b for t in tables for b in t[shared // 16 :]]
    assert len(set(own)) == len(own)
    assert all(row.start == context - 1 and row.write_from >= row.start for row in plan.rows)


def test_no_point_is_longer_than_the_model_can_read() -> None:
    assert max(context for _, context, _ in points(1024)) == 1024
    assert {b for b, c, _ in points(600) if c == 512} == {1, 2, 4, 8, 16, 32, 64}


def test_the_picture_has_every_point() -> None:
    found = [Point(b, c, s, 0.01 * b) for b, c, s in dict.fromkeys(points(8192))]
    assert picture("a <model>", found).count("<circle") == 2 * 7 + 2 * 7
    assert "a &lt;model&gt;" in picture("a <model>", found)


def test_the_command_measures_prints_and_writes(tmp_path: Path) -> None:
    numbers, plot = tmp_path / "c.json", tmp_path / "c.svg"
    asked = ["curves", "--tries", "1", "--kv-cache-memory", "200MiB", "--json", str(numbers), "--plot", str(plot)]
    ran = CliRunner().invoke(command, asked, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    rows = json.loads(numbers.read_text())
    assert {(r["batch"], r["context"]) for r in rows} >= {(1, 512), (8, 128), (8, 256)}
    assert all(r["seconds"] > 0 for r in rows) and (64, 512, 0) not in [
        (r["batch"], r["context"], r["shared"]) for r in rows
    ]
    assert plot.read_text().startswith("<svg")
