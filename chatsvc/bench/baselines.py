"""The engine's own baseline modes: the same loop, model, kernels and weights, an older way to keep memory and to batch.

::

    mode               KV memory of a sequence                   batching                          prefix cache
    contiguous-static  max_model_len consecutive slots, reserved a batch runs until its last       no
                       at its start until its batch has ended    member has ended; nobody joins
    paged-static       blocks as it grows, given back at its end the same                          no
    paged-continuous   blocks as it grows, given back at its end whoever fits joins at every step  no
    chatsvc            the same, equal prefixes shared           the same                          yes

Where a real static server is worse, the baselines are kinder: nobody computes padding, prompts are computed in chunks,
a finished answer is delivered at once. A batch of ``contiguous-static`` is one tensor, so its memory comes back as a
whole; ``paged-static`` gives each member's blocks back when that member ends (nobody can use them before the batch is
over, but they no longer count as reserved). A static batch is formed so that every member fits at its full possible
length: pushing a member out again has no meaning there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from chatsvc.cache.manager import BlockManager, BlockTable, Match
from chatsvc.scheduler.budget import StepBudget
from chatsvc.scheduler.plan import SchedulerOutput
from chatsvc.scheduler.request import Sequence
from chatsvc.scheduler.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run the engine. ``static`` without ``contiguous`` is paged-static."""

    name: str
    text: str
    contiguous: bool = False
    static: bool = False
    prefix_caching: bool = False


MODES = (
    Mode("contiguous-static", "max_model_len slots reserved for each, static batches", contiguous=True, static=True),
    Mode("paged-static", "paged, static batches", static=True),
    Mode("paged-continuous", "paged, continuous batches, no prefix cache"),
    Mode("chatsvc", "paged, continuous batches, prefixes shared", prefix_caching=True),
)


class ContiguousManager(BlockManager):
    """Every sequence gets one extent: the consecutive blocks that hold ``max_model_len`` tokens.

    The pool is cut into as many extents as it holds; blocks left over are not usable. A freed extent is held back
    until :meth:`end_batch`.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        max_model_len: int,
        prefix_caching: bool = False,
        secret: bytes = b"",
    ) -> None:
        super().__init__(num_blocks, block_size, prefix_caching=False, secret=secret)
        self.extent = self.blocks_for(max_model_len)
        if self.extent > num_blocks:
            raise ValueError(f"an extent of {self.extent} blocks does not fit into {num_blocks}")
        self._starts = [1 + i * self.extent for i in reversed(range(num_blocks // self.extent))]
        self._held: list[BlockTable] = []

    def missing(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> int:
        """The whole extent, or more than there is when none is free."""
        if table.blocks:
            return 0
        return self.extent if self._starts else self.pool.num_available + 1

    def allocate(self, table: BlockTable, num_tokens: int, match: Match | None = None, computed: int = 0) -> bool:
        assert num_tokens <= self.extent * self.block_size
        if self.missing(table, num_tokens, match, computed) > self.pool.num_available:
            return False
        if not table.blocks:
            start = self._starts.pop()
            for block in self.pool.blocks[start : start + self.extent]:
                self.pool.ref(block)
                table.blocks.append(block)
        return True

    def fork(self, parent: BlockTable, child: BlockTable) -> None:
        raise NotImplementedError("the contiguous baseline has one answer a request")

    def free(self, table: BlockTable, *, ended: bool = False) -> None:
        """Hold the extent back until the batch ends. Idempotent."""
        if table.blocks:
            self._held.append(BlockTable(blocks=list(table.blocks)))
            table.blocks.clear()
            table.changed()

    def end_batch(self) -> None:
        for table in self._held:
            self._starts.append(table.blocks[0].id)
            super().free(table)
        self._held.clear()

    def filled_slots(self, tables: Iterable[tuple[BlockTable, int]]) -> tuple[int, int]:
        """Extents of finished members are allocated, and nothing in them is of use any more."""
        return super().filled_slots([*tables, *((table, 0) for table in self._held)])

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        every = [*tables, *self._held]
        super().check_integrity(every)
        for ids in (t.ids for t in every if t.blocks):
            assert ids == tuple(range(ids[0], ids[0] + self.extent)) and (ids[0] - 1) % self.extent == 0, ids


class StaticScheduler(Scheduler):
    """Takes a batch from the queue's head and lets nobody join until all its members have ended."""

    def __init__(self, config: SchedulerConfig, manager: BlockManager, budget: StepBudget) -> None:
        super().__init__(config, manager, budget)
        self.batch: set[int] = set()
        self.batches = 0

    def schedule(self) -> SchedulerOutput:
        if not self.batch:
            self._form()
        return super().schedule()

    def _form(self) -> None:
        blocks = 0
        for seq in self.waiting.values():
            full = min(seq.num_prompt + seq.request.params.max_tokens, self.config.max_total_tokens)
            blocks += self.manager.missing(seq.table, full)
            if blocks > self.manager.pool.num_blocks or len(self.batch) >= self.config.max_num_seqs:
                break
            self.batch.add(seq.seq_id)
        self.batches += bool(self.batch)

    def _candidates(self) -> list[Sequence]:
        return [s for s in super()._candidates() if s.seq_id in self.batch]

    def finish(self, seq: Sequence, reason: str) -> None:
        super().finish(seq, reason)
        self.batch.discard(seq.seq_id)
        if not self.batch and isinstance(self.manager, ContiguousManager):
            self.manager.end_batch()
