"""The local executor: a model in this process, stepped by one thread."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.base import AttentionBackend, FusedModel, KVCache
from chatsvc.models.base import CausalLM, ModelShape
from chatsvc.runtime import kv
from chatsvc.runtime.executor import KVCapacity
from chatsvc.runtime.runner import ModelRunner, move, read_blocks, write_blocks
from chatsvc.scheduler.budget import first_budget
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput, StepResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """Attributes:
    kv_dtype: what the pool and the host tier keep; None: the model's dtype.
    num_blocks: usable blocks, or None: as many as ``kv_cache_memory`` bytes hold.
    max_model_len: None: the model's, lowered to what the pool holds for one sequence.
    host_kv_memory: bytes of the host tier; 0: none.
    max_step_seconds: a step of ``tokens_per_step`` tokens should stay under it.
    """

    block_size: int
    kv_cache_memory: int
    num_blocks: int | None = None
    max_model_len: int | None = None
    host_kv_memory: int = 0
    max_step_seconds: float = 0.25
    measure: bool = True
    kv_dtype: torch.dtype | None = None


def plan_capacity(
    config: LocalConfig, shape: ModelShape, dtype: torch.dtype, *, quiet: bool = False
) -> tuple[int, int]:
    """(number of blocks, max_model_len). ``dtype``: of the model. ``quiet``: without the warning that max_model_len is
    lowered.

    Raises: ConfigError with the numbers when an explicit max_model_len, or anything at all, cannot fit.
    """
    per_block = kv.block_bytes(shape, config.block_size, config.kv_dtype or dtype)
    blocks = config.num_blocks if config.num_blocks is not None else config.kv_cache_memory // per_block
    if config.num_blocks is not None and blocks < 1:
        raise ConfigError(f"--num-kv-blocks {blocks}: at least 1 is needed")
    if blocks < 1:
        raise ConfigError(
            f"--kv-cache-memory {config.kv_cache_memory} bytes holds no block; one block of {config.block_size} tokens "
            f"takes {per_block} bytes"
        )
    room = blocks * config.block_size
    if room < 2:
        raise ConfigError("the KV pool holds 1 token; prompt and answer need at least 2 tokens: raise --num-kv-blocks")
    wanted = config.max_model_len
    if wanted is None:
        if room < shape.max_model_len and not quiet:
            log.warning(
                "the KV pool holds %d tokens (%d blocks of %d): max_model_len is lowered to that from the model's %d; "
                "raise --kv-cache-memory to %d MiB for all of it",
                room,
                blocks,
                config.block_size,
                shape.max_model_len,
                -(-shape.max_model_len // config.block_size) * per_block // 2**20 + 1,
            )
        return blocks, min(room, shape.max_model_len)
    if wanted < 2:
        raise ConfigError(f"--max-model-len {wanted}: prompt and answer need at least 2 tokens")
    if wanted > shape.max_model_len:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the model's own limit of {shape.max_model_len} tokens"
        )
    if wanted > room:
        need = -(-wanted // config.block_size)
        raise ConfigError(
            f"--max-model-len {wanted} needs {need} blocks ({need * per_block / 2**20:.0f} MiB) for one sequence, the "
            f"KV pool has {blocks} ({blocks * per_block / 2**20:.0f} MiB, {room} tokens): raise --kv-cache-memory or "
            f"lower --max-model-len to {room}"
        )
    return blocks, wanted


class LocalExecutor:
    """Implements :class:`chatsvc.runtime.executor.Executor`. ``load`` is called on the engine thread."""

    def __init__(self, config: LocalConfig, load: Callable[[], tuple[CausalLM | FusedModel, AttentionBackend]]) -> None:
        self.config = config
        self._load = load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatsvc-engine")
        self.runner: ModelRunner | None = None

    def start(self) -> KVCapacity:
        return self._thread.submit(self._start).result()

    def _start(self) -> KVCapacity:
        # The loop and this thread take turns at the interpreter hundreds of times a step; with the default interval
        # of 5 ms every turn that meets a busy loop would cost that much.
        sys.setswitchinterval(1e-4)
        began = time.perf_counter()
        model, backend = self._load()
        blocks, max_model_len = plan_capacity(self.config, model.shape, model.dtype)
        kept = self.config.kv_dtype or model.dtype
        per_block = kv.block_bytes(model.shape, self.config.block_size, kept)
        cache = kv.allocate(model.shape, blocks, self.config.block_size, kept, model.device)
        host_blocks = self.config.host_kv_memory // per_block
        host = None
        if host_blocks:
            cpu = torch.device("cpu")
            host = kv.allocate(model.shape, host_blocks, self.config.block_size, kept, cpu)
        runner = self.runner = ModelRunner(model, backend, cache, host)
        loaded = time.perf_counter()
        short, per_token = self._measure(runner, max_model_len) if self.config.measure or host else (0.0, 0.0)
        if isinstance(runner.model, FusedModel):
            runner.model.settle()
        tokens_per_step = 512
        if self.config.measure:
            tokens_per_step = first_budget(short, per_token, self.config.max_step_seconds)
        arithmetic = backend.arithmetic(cache)
        log.info(
            "model loaded in %.2f s, measured in %.2f s: attention %s, %d blocks of %d tokens in %s, %d tokens a step",
            loaded - began,
            time.perf_counter() - loaded,
            arithmetic,
            blocks,
            self.config.block_size,
            str(kept).removeprefix("torch."),
            tokens_per_step,
        )
        return KVCapacity(
            num_blocks=blocks,
            max_model_len=max_model_len,
            tokens_per_step=tokens_per_step,
            vocab_size=model.shape.vocab_size,
            num_host_blocks=host_blocks,
            token_seconds=per_token,
            block_seconds=self._measure_move(runner) if host is not None else 0.0,
            block_bytes=per_block,
            layout=f"{model.dtype} in {kept} {list(cache.data.shape[1:])} {arithmetic} {model.device.type}",
        )

    def _measure_move(self, runner: ModelRunner) -> float:
        """Seconds to move one block; the null blocks of both tiers serve as the load."""
        assert runner.host is not None
        began = time.perf_counter()
        for _ in range(8):
            move(runner.cache, runner.host, ((0, 0),))
        return (time.perf_counter() - began) / 8

    def _measure(self, runner: ModelRunner, max_model_len: int) -> tuple[float, float]:
        """(seconds of a step of one token, seconds for each further one), from real steps that write nothing."""

        def seconds(tokens: int) -> float:
            sampling = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, tokens)
            table = (0,) * -(-tokens // self.config.block_size)
            row = ScheduledRow(0, (0,) * tokens, 0, table, tokens, sampling)
            began = time.perf_counter()
            runner.run(SchedulerOutput(0, (row,)))
            return time.perf_counter() - began

        few, many = 1, min(48, max_model_len - 1)  # a token of 96 costs the same, within a few hundredths
        seconds(few)  # the first one pays for lazy initialisation
        # The better of two: a start is often a busy moment.
        short = min(seconds(few), seconds(few))
        return short, max((min(seconds(many), seconds(many)) - short) / max(1, many - few), 1e-6)

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        assert self.runner is not None, "start() first"
        return self._thread.submit(self.runner.run, plan)

    def read_blocks(self, ids: Sequence[int], *, host: bool = False) -> Future[memoryview]:
        return self._thread.submit(read_blocks, self._tier(host), ids)

    def write_blocks(self, ids: Sequence[int], data: bytes, *, host: bool = False) -> Future[None]:
        return self._thread.submit(write_blocks, self._tier(host), ids, data)

    def _tier(self, host: bool) -> KVCache:
        assert self.runner is not None, "start() first"
        tier = self.runner.host if host else self.runner.cache
        assert tier is not None, "there is no host tier"
        return tier

    def stop(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.runner = None
