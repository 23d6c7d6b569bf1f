"""The seam between the loop and whatever computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from chatsvc.scheduler.plan import SchedulerOutput, StepResult


@dataclass(frozen=True, slots=True)
class KVCapacity:
    """What the executor offers once it is loaded.

    Attributes:
        num_blocks: usable blocks (the null block, id 0, is not counted; usable ids are 1..num_blocks).
        max_model_len: tokens of one sequence, after the pool's limit was applied.
        tokens_per_step: how many tokens one step may compute to stay under the step time, as measured at start.
        vocab_size: token ids are 0..vocab_size-1.
        num_host_blocks: blocks of the host tier.
        token_seconds, block_seconds: measured time to compute a token, and to move a block between the tiers.
        block_bytes, layout: size of a block, and everything but the model that its bytes depend on (dtype, shape,
            kernels): only blocks of an equal layout can be written back.
    """

    num_blocks: int
    max_model_len: int
    tokens_per_step: int
    vocab_size: int
    num_host_blocks: int = 0
    token_seconds: float = 0.0
    block_seconds: float = 0.0
    block_bytes: int = 0
    layout: str = ""


class Executor(Protocol):
    """Runs steps in the order of submission. A failed step raises in its future; later steps still run."""

    def start(self) -> KVCapacity:
        """Load and measure. Blocking; called off the loop.

        Raises:
            ConfigError, ModelError: cannot start.
        """
        ...

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        """A future that is cancelled before the step begins is a step that was never submitted."""
        ...

    def read_blocks(self, ids: Sequence[int], *, host: bool = False) -> Future[memoryview]:
        """Bytes of whole blocks of the device's or the host tier's pool, one after the other, as they are when every
        step submitted before has been done: len(ids) * block_bytes."""
        ...

    def write_blocks(self, ids: Sequence[int], data: bytes, *, host: bool = False) -> Future[None]:
        """The reverse of :meth:`read_blocks`, seen by every step submitted later."""
        ...

    def stop(self) -> None: ...
