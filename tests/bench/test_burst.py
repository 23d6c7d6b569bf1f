"""The burst on the real model, small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatsvc.cli.bench import command

pytestmark = pytest.mark.slow


def test_every_mode_finishes_with_the_same_answers(tmp_path: Path) -> None:
    out = tmp_path / "burst.json"
    result = CliRunner().invoke(command, ["burst", "--requests", "10", "--json", str(out)])
    assert result.exit_code == 0, result.output
    rows = {r["mode"]: r for r in json.loads(out.read_text())}
    assert set(rows) == {"recompute", "swap", "auto"}
    assert all(r["equal"] == 10 for r in rows.values())
    assert rows["recompute"]["recomputed"] > 0 and rows["swap"]["swapped"] > 0 and rows["swap"]["recomputed"] == 0
    assert rows["swap"]["computed_tokens"] <= rows["recompute"]["computed_tokens"]
