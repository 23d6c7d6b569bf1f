"""What a scheduler is told, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PolicyName = Literal["fcfs", "priority", "shortest", "fair"]


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Attributes:
    mode: recompute, swap, or auto: whichever is estimated to cost less.
    block_seconds: moving one block between the tiers.
    token_seconds: computing one token.
    """

    mode: Literal["auto", "swap", "recompute"] = "recompute"
    block_seconds: float = 0.0
    token_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Attributes:
    max_num_seqs: sequences that own blocks at a time.
    max_total_tokens: prompt and output of one sequence: min(context, pool).
    watermark_tokens: room kept for each running sequence when a new one is admitted.
    eos_token_ids: the model's end tokens.
    swap: how a preempted sequence's blocks are given up.
    policy: who goes first, see :mod:`chatsvc.scheduler.policy`.
    prefill_share: share of a step's tokens that prompts may take while answers are being generated: less of it
        makes for steadier streams (TPOT), more of it for a faster first token (TTFT).
    """

    max_num_seqs: int
    max_total_tokens: int
    watermark_tokens: int
    eos_token_ids: frozenset[int]
    swap: SwapCosts = SwapCosts()
    policy: PolicyName = "fcfs"
    prefill_share: float = 1.0


@dataclass(slots=True)
class SchedulerStats:
    """Running totals since the start."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    recompute_hit_tokens: int = 0
    preemptions: int = 0  # by recomputation
    swaps: int = 0  # preemptions by swapping
