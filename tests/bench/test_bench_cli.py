"""The command: tables, JSON, errors. Nothing here judges a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from chatsvc.bench import limits
from chatsvc.bench.report import SCHEMA, percentile
from chatsvc.bench.rig import Rig
from chatsvc.cli import bench
from chatsvc.config import ServeConfig
from chatsvc.errors import ConfigError, ModelError
from chatsvc.modelfiles import resolve
from chatsvc.models.config import ModelConfig

try:
    resolve("smollm2-135m")
except ModelError as e:
    pytestmark = pytest.mark.skip(reason=str(e))

SIMULATED = ["--executor", "simulated"]
MODES = ["contiguous-static", "paged-static", "paged-continuous", "chatsvc"]


def invoke(*args: str) -> Any:
    return CliRunner().invoke(bench.command, list(args))


def test_table_and_json(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = invoke(*SIMULATED, "--quick", "--json", str(file))
    assert result.exit_code == 0, result.output
    doc = json.loads(file.read_text())
    assert doc["schema"] == SCHEMA and doc["limits"] is None and doc["waste"] == []
    assert set(doc) == {
        *("schema", "chatsvc", "machine", "model", "settings", "limits", "runs", "comparisons", "waste"),
    }
    assert {"cores", "cpu", "torch", "threads", "python", "load_average"} <= set(doc["machine"])
    assert [(r["workload"], r["mode"]) for r in doc["runs"]] == [(w, m) for w in bench.QUICK for m in MODES]
    for r in doc["runs"]:
        assert 0 < r["slots_used"] <= r["slots_reserved"] <= doc["settings"]["pool_tokens"]
        assert r["waste"] == pytest.approx(1 - r["slots_used"] / r["slots_reserved"])
        assert r["tokens_per_second"] == pytest.approx(r["output_tokens"] / r["seconds"])
        assert r["ttft_p50"] <= r["ttft_p95"] and r["tpot_p50"] <= r["tpot_p95"]
        assert r["computed_tokens"] + r["cached_tokens"] >= r["prompt_tokens"]
        assert 1 <= r["mean_concurrent"] <= r["peak_concurrent"] <= r["requests"]
        line = next(x for x in result.output.splitlines() if x.split()[:2] == [r["workload"], r["mode"]])
        assert line.split()[2] == str(r["requests"]) and f"{r['tokens_per_second']:.1f}" in line.split()
    work = {r["workload"]: r["output_tokens"] for r in doc["runs"]}
    assert all(r["output_tokens"] == work[r["workload"]] for r in doc["runs"])
    assert len(doc["comparisons"]) == 9 and not any(c["mismatches"] or c["ties"] for c in doc["comparisons"])
    assert "0 mismatches" in result.output and "modelled" in result.output


def test_one_mode_one_workload() -> None:
    result = invoke(*SIMULATED, "--mode", "paged-static", "--workload", "single", "--scale", "0.2", "--answers", "0.1")
    assert result.exit_code == 0, result.output
    assert result.output.count("paged-static") == 2  # progress and table
    assert "chatsvc" not in result.output and "Greedy" not in result.output


def test_repeats_take_turns() -> None:
    options = ["--repeat", "2", "--workload", "single", "--scale", "0.2", "--answers", "0.1"]
    result = invoke(*SIMULATED, *options, "--mode", "paged-static", "--mode", "chatsvc")
    assert result.exit_code == 0, result.output
    progress = [x.split()[1] for x in result.output.splitlines() if x.startswith("single,")]
    assert progress == ["paged-static:", "chatsvc:"] * 2
    table = [x.split()[1] for x in result.output.splitlines() if x.startswith("single  ")]
    assert table == ["paged-static", "chatsvc"]


def test_waste(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = invoke("--waste", "--scale", "0.25", "--json", str(file))
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["waste"]
    assert [w["block_size"] for w in rows] == [8, 16, 32, 64, 128]
    assert f"{100 * rows[1]['long']:.1f}%" in result.output


def test_a_mismatch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = bench.drive

    async def lying(rig: Rig, workload: Any, mode: Any, **kw: Any) -> Any:
        run = await drive(rig, workload, mode, **kw)
        if mode.name == "paged-static":
            key = min(run.answers)
            answer = run.answers[key]
            run.answers[key] = type(answer)(answer.prompt, (answer.tokens[0] ^ 1, *answer.tokens[1:]))
        return run

    monkeypatch.setattr(bench, "drive", lying)
    result = invoke(*SIMULATED, "--workload", "decode-heavy", "--scale", "0.2", "--answers", "0.1")
    assert result.exit_code == 1 and "no tie explains it" in result.output
    assert "decode-heavy, paged-static: 0/0 token 0" in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--mode", "magic"], "magic"),
        (["--workload", "magic"], "magic"),
        (["--scale", "0"], "0"),
        (["--json", "."], "is a directory"),
    ],
)
def test_wrong_options(args: list[str], words: str) -> None:
    result = invoke(*SIMULATED, *args)
    assert result.exit_code == 2 and words in result.output


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--block-size", "17"], "--block-size 17"),
        (["--max-num-seqs", "many"], "--max-num-seqs"),
        (["--model", "./nowhere"], "nowhere"),
        (["--executor", "local", "--max-model-len", "8192"], "--max-model-len 8192 needs"),
        ([*SIMULATED, "--quick", "--workload", "single", "--json", "/nowhere/x.json"], "--json"),
    ],
)
def test_wrong_settings(args: list[str], words: str) -> None:
    result = invoke(*args)
    assert isinstance(result.exception, (ConfigError, ModelError)) and words in str(result.exception)


def test_percentiles() -> None:
    assert percentile([], 50) is None
    assert percentile([3.0], 95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 50) == 2.5
    assert percentile(range(101), 95) == 95


CONFIG = ModelConfig("llama", 100, 32, 2, 4, 2, 8, 64, 1e-5, 1e4, 512)


def test_the_work_of_a_decode_step_is_what_the_model_multiplies() -> None:
    """Against a sum over the shapes of the weight matrices, written out."""
    layer = (4 + 2 + 2) * 8 * 32 + 4 * 8 * 32 + 2 * 64 * 32 + 64 * 32
    weights = 2 * layer + 100 * 32
    kv = 2 * 2 * 2 * 8  # layers, K and V, heads, dimension
    assert limits.step_work(CONFIG, 4, 1, 0) == (4 * weights, 2 * weights)
    read, work = limits.step_work(CONFIG, 4, 3, 10)
    assert read == 4 * (weights + 3 * 10 * kv)
    # Scores and their sum over values: two products of [heads, D] with [context, D].
    assert work == 3 * (2 * weights + 2 * (2 * 10 * 4 * 8) * 2)


def test_machine_and_step_are_measured() -> None:
    read, rate = limits.machine(torch.float32, tries=1, elements=2**16, side=64)
    assert read > 0 and rate > 0


def test_the_model_gives_the_same_tokens_in_every_mode(tmp_path: Path) -> None:
    """The real model, a few tokens: what ties there are, are proven."""
    file = tmp_path / "out.json"
    torch.set_num_threads(1)
    options = ["--quick", "--no-limits", "--threads", "1", "--workload", "decode-heavy", "--scale", "0.2"]
    result = invoke(*options, "--answers", "0.05", "--max-num-batched-tokens", "64", "--json", str(file))
    assert result.exit_code == 0, result.output
    doc = json.loads(file.read_text())
    assert sum(c["equal"] + c["ties"] + c["follow_ups"] for c in doc["comparisons"]) == 9
    assert not any(c["mismatches"] for c in doc["comparisons"])


def test_defaults_are_valid() -> None:
    assert isinstance(bench._config({}, waste_only=False), ServeConfig)
    assert set(bench.DEFAULT) == set(bench.trace.NAMES) >= set(bench.QUICK)
