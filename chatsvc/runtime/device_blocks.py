"""A plan's moves of blocks on a GPU, without waiting for it. Importing it needs triton.

    out   kernel: blocks -> one buffer on the device -> pinned memory .... end of the step: -> host tier
    copy  kernel: block -> block
    in    host tier -> one buffer in pinned memory -> device -> kernel: buffer -> blocks

The host tier's bytes are there when the step is over, which is when anybody looks: ``end`` comes after the step's
tokens have been read, and then there is nothing left to wait for.
"""

from __future__ import annotations

import torch

from chatsvc.models.attention.base import KVCache
from chatsvc.scheduler.plan import SchedulerOutput
from kernels.triton.copy_blocks import copy_blocks, gather_blocks, scatter_blocks


class DeviceMoves:
    """See :class:`chatsvc.runtime.runner.Moves`."""

    def __init__(self, cache: KVCache, host: KVCache | None) -> None:
        self._cache, self._host = cache, host
        self._landing: list[tuple[torch.Tensor, tuple[int, ...]]] = []  # on their way, and their host blocks

    def begin(self, plan: SchedulerOutput) -> None:
        pool, host = self._cache.data, self._host
        if host is not None and plan.swap_out:
            sources, targets = zip(*plan.swap_out, strict=True)
            out = gather_blocks(pool, sources)
            self._landing.append((_pinned(out).copy_(out, non_blocking=True), targets))
        copy_blocks(pool, plan.copies)
        if host is not None and plan.swap_in:
            sources, targets = zip(*plan.swap_in, strict=True)
            if any(set(ids) & set(sources) for _, ids in self._landing):
                self.end()
            staged = torch.index_select(host.data, 0, torch.tensor(sources))
            if pool.device.type == "cuda":
                staged = staged.pin_memory()
            scatter_blocks(staged.to(pool.device, non_blocking=True), pool, targets)

    def end(self) -> None:
        if not self._landing:
            return
        assert self._host is not None
        if self._cache.data.device.type == "cuda":
            torch.cuda.current_stream(self._cache.data.device).synchronize()
        landing, self._landing = self._landing, []
        for blocks, ids in landing:
            self._host.data[torch.tensor(ids)] = blocks


def _pinned(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
