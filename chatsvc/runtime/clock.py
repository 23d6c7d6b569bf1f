"""A simulated executor whose text says when it was made: for measuring how old text is when a reader has it.

Steps end at a steady beat. Every token of a step is the same: it stands for the millisecond at which the step ended,
and its text is exactly three characters that JSON does not escape, so a reader can cut any stretch of text into tokens
again.
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
    return time.monotonic_ns() // 1_000_000


class ClockExecutor(SimulatedExecutor):
    """``tokens``: see :func:`clock_tokens`. KV contents are neither written nor read."""

    def __init__(self, config: SimulatedConfig, tokens: list[int]) -> None:
        super().__init__(config)
        self._tokens = tokens
        self._due = 0.0

    def run(self, plan: SchedulerOutput) -> StepResult:
        """One step, which ends one step time after the last one, or at once if that has passed."""
        began = time.perf_counter()
        self.steps += 1
        self._due = max(began, self._due + self.config.step_seconds)
        while (wait := self._due - time.perf_counter()) > 0 and not self._stop.wait(wait):
            pass
        token = SampledToken(self._tokens[milliseconds() % PERIOD])
        tokens = {row.seq_id: [token] for row in plan.rows if row.sampling is not None}
        tokens |= {seq_id: [token] for row in plan.rows for seq_id, _ in row.forks}
        return StepResult(plan.step, tokens, {}, time.perf_counter() - began)
