"""Block manager and scheduler of an engine, from its configuration and what the executor offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chatsvc.cache.manager import BlockManager
from chatsvc.engine.config import EngineConfig
from chatsvc.runtime.executor import KVCapacity
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.settings import SchedulerConfig, SwapCosts


def make_manager(
    config: EngineConfig, capacity: KVCapacity, make: Callable[..., BlockManager] = BlockManager
) -> BlockManager:
    """``make`` is called with what this configuration needs and nothing else."""
    extra: dict[str, Any] = {}
    if capacity.num_host_blocks:
        extra["num_host_blocks"] = capacity.num_host_blocks
    if config.keep_shared:
        extra["keep_shared"] = config.keep_shared
    return make(
        capacity.num_blocks,
        config.block_size,
        prefix_caching=config.prefix_caching,
        secret=config.cache_secret,
        **extra,
    )


def step_budget(config: EngineConfig, capacity: KVCapacity) -> StepBudget:
    return StepBudget(
        config.max_num_batched_tokens or capacity.tokens_per_step,
        adaptive=config.max_num_batched_tokens is None,
        max_seconds=config.max_step_seconds,
    )


def scheduler_config(
    config: EngineConfig, capacity: KVCapacity, *, limit: int, eos_token_ids: frozenset[int]
) -> SchedulerConfig:
    """``limit``: prompt and output of one sequence together."""
    mode = config.preemption if capacity.num_host_blocks else "recompute"
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_total_tokens=limit,
        watermark_tokens=config.block_size if config.watermark_tokens is None else config.watermark_tokens,
        eos_token_ids=eos_token_ids,
        swap=SwapCosts(mode, capacity.block_seconds, capacity.token_seconds),
        policy=config.policy,
        prefill_share=config.prefill_share,
    )
