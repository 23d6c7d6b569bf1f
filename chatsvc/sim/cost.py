"""How long a step takes on a named GPU: a roofline.

::

    seconds = max(bytes moved / bandwidth, FLOPs / rate) + all-reduces + swapped blocks + overhead

    bytes   weights once, K/V of every row's whole context (read), K/V of the step's tokens (written)
    FLOPs   2 x parameters for each token, 4 x head dim x heads x layers for each (query, key) pair

With tensor parallelism each GPU has its share of weights, KV heads and FLOPs, and two all-reduces per layer join them.
"Roofline: an insightful visual performance model", Williams, Waterman, Patterson 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatsvc.scheduler.plan import SchedulerOutput
from chatsvc.sim import hardware as hw
from chatsvc.sim.hardware import GPU
from chatsvc.sim.models import ModelShape


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model on ``tp`` GPUs of one kind."""

    name: str
    model: ModelShape
    gpu: GPU
    tp: int = 1

    @property
    def kv_bytes(self) -> int:
        """Memory for K/V over all GPUs.

        Raises: ValueError when the weights leave none.
        """
        left = int(self.tp * self.gpu.memory * hw.MEMORY_FRACTION) - self.model.weight_bytes
        if left <= 0:
            raise ValueError(f"the weights of {self.model.name} do not fit into {self.tp} x {self.gpu.name}")
        return left

    def num_blocks(self, block_size: int) -> int:
        return self.kv_bytes // (block_size * self.model.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does: ``tokens`` computed, ``sampled`` of them with logits, ``read`` K/V tokens read, ``pairs`` of
    query and key, ``moved`` blocks between device and host."""

    tokens: int
    sampled: int
    read: int
    pairs: int
    moved: int = 0


def work_of(plan: SchedulerOutput) -> Work:
    tokens = sampled = read = pairs = 0
    for row in plan.rows:
        n, start = len(row.token_ids), row.start
        tokens += n
        sampled += row.sampling is not None
        read += start + n
        pairs += n * start + n * (n + 1) // 2
    return Work(tokens, sampled, read, pairs, len(plan.swap_out) + len(plan.swap_in))


class CostModel:
    """Step times of a scenario. ``block_size`` None: K/V is contiguous and read in one run for each sequence."""

    def __init__(self, scenario: Scenario, block_size: int | None) -> None:
        self.scenario = scenario
        model, gpu, tp = scenario.model, scenario.gpu, scenario.tp
        self.read_efficiency = 1.0 if block_size is None else read_efficiency(scenario, block_size)
        self.block_seconds = copy_seconds(scenario, block_size or 0)
        """Moving one block between device and host; not overlapped with the step."""
        self.token_seconds = 2 * model.layer_params / tp / (gpu.flops * hw.COMPUTE_FRACTION)
        """Computing one token beside others: the matrices' FLOPs."""
        self._bandwidth = gpu.hbm_bandwidth * hw.BANDWIDTH_FRACTION
        self._rate = gpu.flops * hw.COMPUTE_FRACTION
        self._weights = model.read_bytes / tp
        self._kv = model.kv_bytes_per_token / tp
        self._linear = 2 * model.layer_params / tp
        self._head = 2 * model.head_params / tp
        self._pair = 4 * model.head_dim * model.heads * model.layers / tp
        self._reduce_fixed = 2 * model.layers * hw.ALL_REDUCE_LATENCY if tp > 1 else 0.0
        ring = 2 * (tp - 1) / tp * model.dim * model.bytes_per_element
        self._reduce_token = 2 * model.layers * ring / (gpu.nvlink_bandwidth * hw.BANDWIDTH_FRACTION)

    def seconds(self, work: Work) -> float:
        if not work.tokens:
            return 0.0
        moved = self._weights + self._kv * (work.read / self.read_efficiency + work.tokens)
        reduces = self._reduce_fixed + self._reduce_token * work.tokens
        swapped = work.moved * self.block_seconds
        return max(moved / self._bandwidth, self.compute_seconds(work)) + reduces + swapped + hw.STEP_OVERHEAD

    def compute_seconds(self, work: Work) -> float:
        """The FLOPs alone."""
        flops = self._linear * work.tokens + self._head * work.sampled + self._pair * work.pairs
        return flops / self._rate


def read_efficiency(scenario: Scenario, block_size: int) -> float:
    """Assumed share of the bandwidth that attention reaches when it reads K/V block by block.

    A run is K (or V) of one block, layer and GPU: ``block_size x KV heads of the GPU x head dim``.
    """
    model = scenario.model
    run = block_size * model.kv_heads / scenario.tp * model.head_dim * model.bytes_per_element
    return run / (run + hw.RUN_OVERHEAD_BYTES)


def copy_seconds(scenario: Scenario, tokens: int, pieces: int = 1) -> float:
    """One way over PCIe for the K/V of ``tokens`` in so many copies; each GPU moves its share over its own link."""
    each = tokens * scenario.model.kv_bytes_per_token / scenario.tp
    return each / (scenario.gpu.pcie_bandwidth * hw.BANDWIDTH_FRACTION) + pieces * hw.COPY_LAUNCH
