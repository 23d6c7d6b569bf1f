"""The command, its files and its pictures."""

from __future__ import annotations

import io
import json
import xml.etree.ElementTree as ET

import pytest
from click.testing import CliRunner

from chatsvc.cli.simulate import command
from chatsvc.sim import modes, plots
from chatsvc.sim.literature import compare
from chatsvc.sim.scenarios import SCENARIOS
from chatsvc.sim.section import Section, percentile
from chatsvc.sim.study import Study
from chatsvc.sim.svg import grid_paths, ticks
from chatsvc.sim.tracefile import read


def invoke(*args: str):
    return CliRunner().invoke(command, list(args), catch_exceptions=False)


def test_percentile() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(range(1, 101), 0.95) == 95
    assert percentile([7.0], 0.95) == 7.0 and percentile([1.0, 2.0], 0.5) == 1.0


def test_a_section_prints_its_rows() -> None:
    section = Section("x", "Title", (("a", "name", ""), ("b", "share", ".1%"), ("c", "n", ",d")), notes=["hm"])
    section.rows += [{"a": "one", "b": 0.125, "c": 1234}, {"a": "two", "b": None, "c": 5}]
    out = io.StringIO()
    section.print(out)
    lines = out.getvalue().splitlines()
    assert lines[1] == "Title" and lines[-1] == "  * hm"
    assert lines[4].split() == ["one", "12.5%", "1,234"] and lines[5].split() == ["two", "-", "5"]


def test_numbers_of_the_quick_parts(tmp_path) -> None:
    path = tmp_path / "n.json"
    result = invoke("--only", "kv", "--only", "swap", "--only", "fit", "--json", str(path))
    assert result.exit_code == 0 and "320 KiB" in result.output
    sections = json.loads(path.read_text())["sections"]
    assert set(sections) == {"kv", "swap", "fit", "literature"}
    per_token = {r["scenario"]: r["per_token"] for r in sections["kv"]["rows"]}
    assert per_token["llama-3-70b"] == 327_680
    for row in sections["fit"]["rows"]:
        assert row["reserve_max"] <= row["reserve_2048"] <= row["pow2"] <= row["oracle"] < row["paged"]


def test_a_trace_is_written_and_replayed(tmp_path) -> None:
    path, numbers = tmp_path / "t.jsonl", tmp_path / "n.json"
    result = invoke("--write-trace", str(path), "--kind", "alpaca", "--requests", "30", "--rate", "5", "--seed", "4")
    assert result.exit_code == 0 and len(read(path)) == 30
    for _ in range(2):
        result = invoke("--trace", str(path), "--json", str(numbers))
        assert result.exit_code == 0
        rows = json.loads(numbers.read_text())["sections"]["replay"]["rows"]
        whole = [r for r in rows if r["tenant"] == "all"]
        assert {r["requests"] for r in whole} == {30}
        assert {r["output"] for r in whole} == {sum(e.output_len for e in read(path))}
        assert min(whole, key=lambda r: r["waste"])["mode"] in (modes.PAGED.name, modes.SHARED.name)


def test_wrong_options() -> None:
    assert invoke("--scale", "0").exit_code == 2
    assert invoke("--rate", "-1", "--write-trace", "x").exit_code == 2
    assert invoke("--scenario", "tpu").exit_code == 2


def test_literature_says_nothing_without_runs() -> None:
    assert compare({}).rows == []


def test_ticks() -> None:
    assert ticks(10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.7)[-1] >= 0.7 and len(ticks(0.7)) <= 7
    assert ticks(0) == [0.0, 1.0]


def test_grid_paths_cover_every_cell_once() -> None:
    rows = [[0, 0, 1], [1, 1, 1], [2, 0, 2]]
    paths = grid_paths(rows, (2.0, 5.0), (0.0, 0.0))
    runs = {level: path.count("M") for level, path in paths.items()}
    assert runs == {0: 2, 1: 2, 2: 2}
    assert paths[1].startswith("M4 0h2v4h-2z") and "M0 5h6v4h-6z" in paths[1]


@pytest.fixture(scope="module")
def saturated() -> Section:
    section = Section("saturated/x/y", "Model on GPU, trace, load", ())
    for i, mode in enumerate((modes.STATIC, modes.PAGED)):
        section.rows.append({"mode": mode.name, "throughput": 100.0 + 300 * i, "speedup": 1.0 + 3 * i})
    return section


def test_pictures_are_well_formed(tmp_path, saturated, monkeypatch) -> None:
    sizes = Section("block_sizes", "", ())
    for size in (4, 16, 64):
        share = size / 1000
        sizes.rows.append(
            {"block_size": size, "sharegpt_waste": share, "long_waste": share / 2, "alpaca_waste": 3 * share}
        )
    short = plots.single_turns
    monkeypatch.setattr(plots, "single_turns", lambda name, n, rate, seed: short("alpaca", 60, rate, seed))
    files = plots.write_all(tmp_path, SCENARIOS["llama-2-7b"], 0, sizes, [saturated])
    assert {f.name for f in files} == {
        "memory-over-time.svg",
        "blocks.svg",
        "waste-by-block-size.svg",
        "throughput.svg",
    }
    for file in files:
        root = ET.fromstring(file.read_text())
        assert root.tag.endswith("svg") and len(root) > 5
        assert file.stat().st_size < 200_000


def test_saturated_rows_add_up() -> None:
    section = Study(scale=0.02).saturated(SCENARIOS["opt-13b"], "alpaca", (modes.STATIC, modes.ORACLE, modes.PAGED))
    for row in section.rows:
        parts = ("tokens", "future", "internal", "external", "free")
        assert sum(row[p] for p in parts) == pytest.approx(1)
        assert row["throughput"] > 0
    static, oracle, paged = section.rows
    assert static["speedup"] == 1 and paged["waste"] < oracle["waste"] < static["waste"]
