"""The GPU bench without a GPU: its formulas, its tables, its correctness cases in the interpreter, its refusal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import bench
from kernels.bench import Batch, Heads, Machine, batch_of, decode_row, operations, prefill_row, read_bytes

SMALL = Heads(heads=6, kv_heads=2, dim=16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernels.bench"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(bench.__file__).parents[1],
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "there is no GPU that torch can use: nothing was measured\n"


def test_bytes_and_operations() -> None:
    batch = Batch([1, 3], [10, 5], [[1], [2]])
    # K and V of 15 keys x 2 heads x 16; q and the output of 4 tokens x 6 heads x 16; two bytes each.
    assert read_bytes(batch, SMALL) == 2 * (2 * 15 * 2 * 16 + 2 * 4 * 6 * 16)
    # One query sees 10 keys, the three others 3, 4 and 5; a product and a sum, for q @ k and for the values.
    assert operations(batch, SMALL) == 4 * 6 * 16 * (10 + 3 + 4 + 5)


def test_shares_of_the_machine() -> None:
    machine = Machine("test", bandwidth=1e12, rate=1e15)
    heads = Heads(heads=1, kv_heads=1, dim=1)
    decode = Batch([1] * 4, [249_999] * 4, [[1]] * 4)
    # 4 MB in 8 us is half of the bandwidth.
    assert decode_row(decode, heads, machine, 8e-6, None) == ["4", "249999", "0.008", "50%", "-"]
    prefill = Batch([10_000], [10_000], [[1]])
    # 4 * 10000 * 10001 / 2 operations take 0.2 us; in 0.8 us that is a quarter.
    assert prefill_row(prefill, heads, machine, 8e-7, 2e-3) == ["10000", "10000", "0.001", "25%", "2.000"]


def test_table() -> None:
    assert bench.table("T", ("a", "b"), [["1", "2"]]).splitlines() == [
        "",
        "T",
        "",
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
    ]


def test_blocks_are_scattered_and_shared_where_asked() -> None:
    batch = batch_of(3, 1, 100, shared=40)
    assert [table[:2] for table in batch.tables] == [batch.tables[0][:2]] * 3
    own = [b for table in batch.tables for b in table[2:]]
    assert len(set(own)) == len(own) == 3 * 5
    assert sorted({*own, *batch.tables[0][:2]}) == list(range(1, batch.blocks))
    assert batch.tables[0] != sorted(batch.tables[0])


def test_every_timed_case_is_checked_first() -> None:
    pytest.importorskip("triton")
    errors = dict(bench.right("cpu", SMALL, programs=10**4))
    assert set(errors) == {"decode", "split decode", "prefill", "cascade"}
    assert all(error < 0.05 for error in errors.values()), errors


def test_every_table_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole measurement in the interpreter: one case of each table, and a clock that stands still."""
    pytest.importorskip("triton")
    monkeypatch.setattr(bench, "DECODE_CONTEXTS", (20, 40))
    monkeypatch.setattr(bench, "DECODE_BATCHES", (1, 2))
    monkeypatch.setattr(bench, "MOST_KEYS", 40)
    monkeypatch.setattr(bench, "PREFILLS", ((8, 8), (4, 20)))
    monkeypatch.setattr(bench, "CASCADES", ((3, 160, 10),))
    calls: list[None] = []

    def one_second(f: Callable[[], object]) -> float:
        f()
        calls.append(None)
        return 1.0

    monkeypatch.setattr(bench, "seconds", one_second)
    text = "\n".join(bench.measure(Machine("test", 1e12, 1e15), SMALL, 4, "cpu"))
    assert [line for line in text.splitlines() if line[:1].isalpha()] == ["Decode", "Prefill", "Shared prefix"]
    assert len([line for line in text.splitlines() if line.startswith("| ")]) == 3 + 3 + 3 + 2 + 1
    assert len(calls) == 2 * 3 + 2 * 2 + 2
    assert "| 3 | 160 | 10 | 1000.000 | 1000.000 | 1.0x |" in text


def test_torch_beside_ours_computes_the_same() -> None:
    pytest.importorskip("triton")
    runner = bench.Runner(batch_of(2, 4, 20), SMALL, "cpu", torch.float32)
    runner.pool.fill_(1.0)
    runner.launch(cascade=False, programs=1)()
    torchs = runner.torchs()().transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(runner.out, torchs, rtol=0, atol=1e-5)
