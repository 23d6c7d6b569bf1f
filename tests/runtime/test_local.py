"""Capacity and its refusals, the step's layout, and a local executor around a model that the test writes."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.torch_backend import TorchBackend
from chatsvc.models.base import Attend, ModelShape
from chatsvc.runtime import kv
from chatsvc.runtime.local import LocalConfig, LocalExecutor, plan_capacity
from chatsvc.runtime.runner import layout_of
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput

SHAPE = ModelShape(vocab_size=40, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, max_model_len=1000)
PER_BLOCK = 3 * 2 * 16 * 2 * 8 * 4  # layers, K and V, tokens, heads, dim, bytes


def test_ME_01_a_block_is_what_it_takes() -> None:
    assert kv.block_bytes(SHAPE, 16, torch.float32) == PER_BLOCK
    assert kv.block_bytes(SHAPE, 16, torch.float16) == PER_BLOCK // 2
    cache = kv.allocate(SHAPE, 5, 16, torch.float32, torch.device("cpu"))
    assert cache.data.nbytes == 6 * PER_BLOCK, "the null block is there beside the usable ones"


@pytest.mark.parametrize(
    ("config", "blocks", "length"),
    [
        (LocalConfig(16, 100 * PER_BLOCK), 100, 1000),
        (LocalConfig(16, 100 * PER_BLOCK - 1), 99, 1000),
        (LocalConfig(16, 10 * PER_BLOCK), 10, 160),
        (LocalConfig(16, 0, num_blocks=7), 7, 112),
        (LocalConfig(16, 0, num_blocks=7, max_model_len=112), 7, 112),
        (LocalConfig(16, 0, num_blocks=7, max_model_len=50), 7, 50),
        (LocalConfig(16, 100 * PER_BLOCK, num_blocks=2), 2, 32),
    ],
)
def test_ME_01_capacity(config: LocalConfig, blocks: int, length: int, caplog: pytest.LogCaptureFixture) -> None:
    assert plan_capacity(config, SHAPE, torch.float32) == (blocks, length)
    lowered = config.max_model_len is None and length < SHAPE.max_model_len
    assert ("lowered" in caplog.text) == lowered
    if lowered:
        assert str(length) in caplog.text and "1000" in caplog.text


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        (LocalConfig(16, PER_BLOCK - 1), [str(PER_BLOCK - 1), str(PER_BLOCK), "16"]),
        (LocalConfig(16, 0, num_blocks=0), ["--num-kv-blocks 0"]),
        (LocalConfig(16, 0, num_blocks=7, max_model_len=113), ["113", "8 blocks", "7 (", "112"]),
        (LocalConfig(16, 10**9, max_model_len=1001), ["1001", "1000"]),
        (LocalConfig(16, 10**9, max_model_len=1), ["--max-model-len 1"]),
        (LocalConfig(1, 0, num_blocks=1), ["2 tokens"]),
    ],
    ids=str,
)
def test_ME_01_what_cannot_fit_is_refused_with_the_numbers(config: LocalConfig, numbers: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        plan_capacity(config, SHAPE, torch.float32)
    for number in numbers:
        assert number in str(refused.value)


def test_ME_01_a_pool_the_machine_has_no_memory_for() -> None:
    with pytest.raises(ConfigError, match=r"1000000000000 blocks are .* GiB; lower --kv-cache-memory"):
        kv.allocate(SHAPE, 10**12, 16, torch.float32, torch.device("cpu"))


def row(seq_id: int, tokens: int, start: int, table: tuple[int, ...], *, write_from: int = -1, sample: bool) -> Any:
    sampling = SamplingRow(SamplingParams(max_tokens=5, temperature=0.0), 0, start + tokens) if sample else None
    ids = tuple(range(start, start + tokens))
    return ScheduledRow(seq_id, ids, start, table, start if write_from < 0 else write_from, sampling)


def test_the_layout_of_a_mixed_step() -> None:
    rows = (
        row(1, 5, 0, (7, 3), sample=False),  # a prompt's first chunk
        row(2, 1, 6, (2, 9), sample=True),  # decode
        row(3, 4, 4, (5, 6), write_from=6, sample=True),  # two of its tokens are in the cache already
        row(4, 1, 7, (8, 1), write_from=8, sample=True),  # a fully cached prompt: reads, writes nothing
    )
    layout = layout_of(rows, 4)
    assert layout.query_lens == [5, 1, 4, 1]
    assert layout.seq_lens == [5, 7, 8, 8]
    assert [list(t) for t in layout.block_tables] == [[7, 3], [2, 9], [5, 6], [8, 1]]
    assert layout.slot_mapping == [28, 29, 30, 31, 12, 38, -1, -1, 26, 27, -1]


class CountingModel:
    """Says the token after the last one; attends once, so that the cache is really used."""

    shape = SHAPE
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.rows: list[int] = []

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, rows: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go.wait(60)
        if (ids == 39).any():
            raise RuntimeError("39 is too much")
        kv_heads = torch.zeros(len(ids), 2, 8)
        attend(0, torch.zeros(len(ids), 4, 8), kv_heads, kv_heads)
        self.rows = rows.tolist()
        return torch.nn.functional.one_hot((ids[rows] + 1) % 40, 40).float() * 10


def started(**changes: Any) -> tuple[LocalExecutor, CountingModel]:
    model = CountingModel()
    config = LocalConfig(**{"block_size": 4, "kv_cache_memory": 0, "num_blocks": 9, "measure": False, **changes})
    executor = LocalExecutor(config, lambda: (model, TorchBackend()))
    executor.start()
    return executor, model


def test_a_step_samples_the_rows_that_ask_for_it() -> None:
    executor, model = started()
    try:
        plan = SchedulerOutput(
            4, (row(1, 5, 0, (7, 3), sample=False), row(2, 3, 0, (2,), sample=True), row(5, 2, 0, (5,), sample=True))
        )
        result = executor.submit(plan).result(60)
        assert result.step == 4 and result.seconds > 0 and result.errors == {}
        assert {i: [t.token_id for t in ts] for i, ts in result.tokens.items()} == {2: [3], 5: [2]}
        assert model.rows == [7, 9]
        only = executor.submit(SchedulerOutput(5, (row(1, 2, 5, (7, 3), sample=False),))).result(60)
        assert only.tokens == {} and model.rows == []
    finally:
        executor.stop()


def test_a_failing_forward_raises_in_its_own_future_only() -> None:
    executor, _ = started()
    try:
        bad = executor.submit(SchedulerOutput(1, (row(1, 2, 38, tuple(range(1, 10)) * 2, sample=True),)))
        good = executor.submit(SchedulerOutput(2, (row(2, 2, 0, (1,), sample=True),)))
        with pytest.raises(RuntimeError, match="39 is too much"):
            bad.result(60)
        assert good.result(60).tokens[2][0].token_id == 2
    finally:
        executor.stop()


def test_steps_run_in_order_and_stop_waits_for_the_one_that_runs() -> None:
    executor, model = started()
    model.entered.clear()
    model.go.clear()
    running = executor.submit(SchedulerOutput(1, (row(1, 2, 0, (1,), sample=True),)))
    queued = executor.submit(SchedulerOutput(2, (row(2, 2, 0, (2,), sample=True),)))
    assert model.entered.wait(60)
    stopper = threading.Thread(target=executor.stop)
    stopper.start()
    assert not running.done() and stopper.is_alive()
    model.go.set()
    stopper.join(60)
    assert not stopper.is_alive()
    assert running.result(60).tokens[1][0].token_id == 2
    with pytest.raises(CancelledError):
        queued.result(60)
    executor.stop()  # twice is once


@pytest.mark.parametrize("length", [2, 3, 36])
def test_the_start_measures_how_much_a_step_may_do(length: int) -> None:
    model = CountingModel()
    config = LocalConfig(4, 0, num_blocks=9, max_model_len=length)
    executor = LocalExecutor(config, lambda: (model, TorchBackend()))
    try:
        capacity = executor.start()
        assert (capacity.num_blocks, capacity.max_model_len, capacity.vocab_size) == (9, length, 40)
        assert 16 <= capacity.tokens_per_step <= 8192
    finally:
        executor.stop()


def test_a_load_that_fails_is_raised_by_start() -> None:
    def load() -> Any:
        raise ConfigError("no such model")

    executor = LocalExecutor(LocalConfig(4, 0, num_blocks=9), load)
    with pytest.raises(ConfigError, match="no such model"):
        executor.start()
    executor.stop()
