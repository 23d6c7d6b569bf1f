"""What an engine can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from chatsvc.engine.persistence import DiskCache


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Times in seconds.

    Attributes:
        max_num_batched_tokens: tokens of a step; None: adaptive, so that a step stays under ``max_step_seconds``.
        watermark_tokens: room kept for each running sequence when a new one is admitted; None: one block.
        max_queue: requests that wait; one more is refused.
        queue_timeout: a request that has waited longer is failed.
        stuck_after: a step that takes longer makes the engine unhealthy, and new requests are refused.
        give_up_after: a step that takes longer fails every request that is here; the engine goes on if it ever ends.
        preemption: with a host tier: swap, recompute, or (auto) what is estimated to cost less.
        steps_in_flight: 1, or 2, which plans a step while the one before it runs: no gap between them. A request that
            comes meanwhile waits no longer for that.
        disk_cache: where hot prefixes survive a restart; needs prefix caching.
    """

    block_size: int = 16
    prefix_caching: bool = True
    cache_secret: bytes = b""
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_step_seconds: float = 0.25
    watermark_tokens: int | None = None
    max_queue: int = 256
    queue_timeout: float = 60.0
    stuck_after: float = 10.0
    give_up_after: float = 60.0
    preemption: Literal["auto", "swap", "recompute"] = "auto"
    steps_in_flight: int = 2
    disk_cache: DiskCache | None = None
    policy: Literal["fcfs", "priority", "shortest", "fair"] = "fcfs"
    prefill_share: float = 1.0
    keep_shared: float = 0.0
