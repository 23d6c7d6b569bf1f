"""What the machine could do, measured in the same run, and how near to it a decode step comes.

A step must read all weights and the KV of its sequences once, and multiply: it cannot be faster than
max(bytes / bandwidth, operations / rate) (the roofline of Williams et al. 2009).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from chatsvc.config import usable_cpus
from chatsvc.errors import ConfigError
from chatsvc.models.config import ModelConfig
from chatsvc.models.cpu_step import CpuModel
from chatsvc.runtime import kv
from chatsvc.runtime.runner import ModelRunner
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow, SchedulerOutput

BATCHES = (1, 16)
CONTEXT = 256
BLOCK = 16


@dataclass(frozen=True, slots=True)
class DecodeShare:
    """A decode step of ``batch`` sequences at ``context`` tokens each.

    Attributes:
        seconds: the best of several, sampling included.
        limit_seconds: what the measured bandwidth and rate allow.
        bound: which of the two it is: "bandwidth" or "arithmetic".
        share: limit_seconds / seconds.
    """

    batch: int
    context: int
    seconds: float
    limit_seconds: float
    bound: str
    share: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Attributes:
    read_bytes_per_second: summing a float32 tensor far larger than any cache.
    flops_per_second: a square matrix product in the model's dtype; int8 operations are taken to be twice as fast.
    """

    read_bytes_per_second: float
    flops_per_second: float
    decode: tuple[DecodeShare, ...]


def _best(f: Callable[[], object], n: int) -> float:
    f()
    best = float("inf")
    for _ in range(n):
        began = time.perf_counter()
        f()
        best = min(best, time.perf_counter() - began)
    return best


@torch.inference_mode()
def machine(dtype: torch.dtype, *, tries: int = 15, elements: int = 2**26, side: int = 2048) -> tuple[float, float]:
    """(bytes/s read, operations/s of a matrix product), the best of several tries, with all usable cores.

    The compiled kernels have threads of their own and leave torch one: it gets them back for the measurement.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_cpus())
    try:
        return _machine(dtype, tries, elements, side)
    finally:
        torch.set_num_threads(threads)


def _machine(dtype: torch.dtype, tries: int, elements: int, side: int) -> tuple[float, float]:
    big = torch.ones(elements)
    read = big.numel() * big.itemsize / _best(big.sum, tries)
    del big
    x, y = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
    return read, 2 * side**3 / _best(lambda: x @ y, tries)


def step_work(
    config: ModelConfig, itemsize: int, batch: int, context: int, weight_bytes: int | None = None
) -> tuple[int, int]:
    """(bytes read, floating-point operations) that a decode step cannot avoid; ``weight_bytes``: what the weights take,
    where that is not ``itemsize`` for each."""
    d, heads, kv_heads = config.head_dim, config.num_heads, config.num_kv_heads
    layer = config.hidden_size * ((2 * heads + 2 * kv_heads) * d + 3 * config.intermediate_size)
    weights = config.num_layers * layer + config.vocab_size * config.hidden_size
    cached = batch * context * config.num_layers * 2 * kv_heads * d
    attention = batch * context * config.num_layers * 4 * heads * d
    return (weight_bytes or weights * itemsize) + cached * itemsize, 2 * weights * batch + attention


def measure(runner: ModelRunner, config: ModelConfig, *, tries: int = 8) -> Limits:
    """Measure machine and decode steps; the executor must be idle. Raises: ConfigError unless the model is on a CPU."""
    model = runner.model
    if model.device.type != "cpu":
        raise ConfigError("the limits are measured on a CPU only")
    read, rate = machine(model.dtype)
    blocks = CONTEXT // BLOCK
    cache = kv.allocate(model.shape, max(BATCHES) * blocks, BLOCK, model.dtype, model.device)
    cache.data.zero_()
    own = ModelRunner(model, runner.backend, cache)
    shares = []
    for batch in BATCHES:
        sampling = SamplingRow(SamplingParams(max_tokens=1, temperature=0.0), 0, CONTEXT)
        tables = [tuple(range(1 + i * blocks, 1 + (i + 1) * blocks)) for i in range(batch)]
        rows = tuple(ScheduledRow(i, (1,), CONTEXT - 1, t, CONTEXT - 1, sampling) for i, t in enumerate(tables))
        plan = SchedulerOutput(0, rows)
        seconds = _best(lambda plan=plan: own.run(plan), tries)  # type: ignore[misc]
        packed = model.weight_bytes if isinstance(model, CpuModel) else None
        needed, work = step_work(config, model.dtype.itemsize, batch, CONTEXT, packed)
        int8 = isinstance(model, CpuModel) and model.int8
        by_bytes, by_work = needed / read, work / (2 * rate if int8 else rate)
        bound = "bandwidth" if by_bytes >= by_work else "arithmetic"
        limit = max(by_bytes, by_work)
        shares.append(DecodeShare(batch, CONTEXT, seconds, limit, bound, limit / seconds))
    return Limits(read, rate, tuple(shares))
