"""A simulated executor whose text says when it was made: for measuring how old text is when a reader has it.

Every token of a step is the same: it stands for the millisecond at which the modelled device was done with the step,
and its text is exactly three characters that JSON does not escape, so a reader can cut any stretch of text into tokens
again. That this process woke up too late to see the end counts as age.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor
from chatsvc.scheduler.plan import SampledToken, SchedulerOutput, StepResult

PERIOD = 3600  # milliseconds until the clock begins anew
WIDTH = 3
PLAIN = frozenset(range(32, 127)) - frozenset(b'"\\')


def clock_tokens(vocab_size: int, token_bytes: Callable[[int], bytes], is_special: Callable[[int], bool]) -> list[int]:
    """PERIOD token ids, one for each millisecond. Raises: ValueError when the vocabulary has too few fitting ones."""
    found = []
    for token_id in range(vocab_size):
        text = token_bytes(token_id)
        if len(text) == WIDTH and PLAIN.issuperset(text) and not is_special(token_id):
            found.append(token_id)
            if len(found) == PERIOD:
                return found
    raise ValueError(f"the vocabulary has {len(found)} tokens of three plain characters, the clock needs {PERIOD}")


def milliseconds() -> int:
    """Now, on the clock that all processes of a machine share."""
    return int(time.monotonic() * 1000)


class ClockExecutor(SimulatedExecutor):
    """``tokens``: see :func:`clock_tokens`. KV contents are neither written nor read."""

    def __init__(self, config: SimulatedConfig, tokens: list[int]) -> None:
        super().__init__(config)
        self._tokens = tokens

    def run(self, plan: SchedulerOutput) -> StepResult:
        """See :class:`SimulatedExecutor`."""
        began = self._begin()
        ended = self._end(plan, began)
        token = SampledToken(self._tokens[int(ended * 1000) % PERIOD])
        tokens = {row.seq_id: [token] for row in plan.rows if row.sampling is not None}
        tokens |= {seq_id: [token] for row in plan.rows for seq_id, _ in row.forks}
        return StepResult(plan.step, tokens, {}, ended - began)
