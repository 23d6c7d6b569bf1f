"""An executor without a model: the same seam, a modelled step time, and a KV pool that remembers tokens.

Its "KV" of a slot is the token written there, and the token it samples is a pure function of what it reads back through
the block table. A wrong block, a stale block or an unwritten slot therefore changes the output: the scheduler and the
block manager are proven with it, and capacity is planned with it.

Steps take the time a device would take: one begins when it was submitted or when the one before it ended, whichever is
later. So with two steps in flight nothing is lost between them, as on a device with a queue; with one, the time until
the next is submitted is lost.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice

import xxhash

from chatsvc.runtime.executor import KVCapacity
from chatsvc.scheduler.plan import SampledToken, SamplingRow, ScheduledRow, SchedulerOutput, StepResult

UNWRITTEN = -7

TokenFn = Callable[["array[int]", ScheduledRow], int]


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Attributes:
    step_seconds: fixed part of a step.
    token_seconds: added for each computed token.
    first_token_id: sampled ids lie in [first_token_id, vocab_size), so that they are text and not control tokens.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    step_seconds: float = 0.0
    token_seconds: float = 0.0
    first_token_id: int = 0
    tokens_per_step: int = 512
    num_host_blocks: int = 0


def hashed_token(first: int, vocab_size: int, seed_by_choice: bool = True) -> TokenFn:
    """A token that depends on every token before it (and on seed and choice when the temperature is not 0)."""

    def token(context: array[int], row: ScheduledRow) -> int:
        h = xxhash.xxh3_64(context.tobytes())
        sampling = row.sampling
        assert sampling is not None
        if seed_by_choice and sampling.params.temperature > 0:
            h.update(f"{sampling.params.seed}/{sampling.choice}/{sampling.position}".encode())
        return first + h.intdigest() % (vocab_size - first)

    return token


def candidates(context: array[int], sampling: SamplingRow, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Continuations for beam search that depend on every token of the context: (token, log-probability), best first."""
    start = xxhash.xxh3_64_intdigest(context.tobytes())
    tokens = (t for i in range(vocab_size) if (t := (start + i * 7) % vocab_size) not in sampling.forbidden_ids)
    chosen = list(islice(tokens, sampling.candidates))
    spread = [((start >> (i % 50)) & 1023) / 1024 for i in range(len(chosen))]
    return tuple((t, -0.2 - 0.3 * i - 0.29 * s) for i, (t, s) in enumerate(zip(chosen, spread, strict=True)))


class SimulatedExecutor:
    """Implements :class:`chatsvc.runtime.executor.Executor`; steps run on a thread of their own."""

    def __init__(self, config: SimulatedConfig, token_fn: TokenFn | None = None) -> None:
        self.config = config
        self._token_fn = token_fn or hashed_token(config.first_token_id, config.vocab_size)
        self._pool = array("i", [UNWRITTEN]) * ((config.num_blocks + 1) * config.block_size)
        self._host = array("i", [UNWRITTEN]) * ((config.num_host_blocks + 1) * config.block_size)
        self._thread: ThreadPoolExecutor | None = None
        self._stop = threading.Event()
        self.steps = 0
        self._before: StepResult | None = None
        self._asked: float | None = None  # when the step that begins was submitted; None: now
        self._free = 0.0  # when the last step ended

    def start(self) -> KVCapacity:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chatsvc-sim")
        c = self.config
        size = c.block_size * self._pool.itemsize
        return KVCapacity(
            c.num_blocks,
            c.max_model_len,
            c.tokens_per_step,
            c.vocab_size,
            c.num_host_blocks,
            block_bytes=size,
            layout="simulated",
        )

    def submit(self, plan: SchedulerOutput) -> Future[StepResult]:
        assert self._thread is not None, "start() first"
        asked = time.monotonic()

        def run(plan: SchedulerOutput) -> StepResult:
            self._asked = asked
            return self.run(plan)

        return self._thread.submit(run, plan)

    def read_blocks(self, ids: Sequence[int], *, host: bool = False) -> Future[memoryview]:
        assert self._thread is not None, "start() first"
        return self._thread.submit(self._read_blocks, self._host if host else self._pool, ids)

    def write_blocks(self, ids: Sequence[int], data: bytes, *, host: bool = False) -> Future[None]:
        assert self._thread is not None, "start() first"
        return self._thread.submit(self._write_blocks, self._host if host else self._pool, ids, data)

    def _read_blocks(self, pool: array[int], ids: Sequence[int]) -> memoryview:
        size = self.config.block_size
        return memoryview(b"".join(pool[i * size : (i + 1) * size].tobytes() for i in ids))

    def _write_blocks(self, pool: array[int], ids: Sequence[int], data: bytes) -> None:
        size = self.config.block_size
        tokens = array("i", data)
        for n, i in enumerate(ids):
            pool[i * size : (i + 1) * size] = tokens[n * size : (n + 1) * size]

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def run(self, plan: SchedulerOutput) -> StepResult:
        """One step: every row writes before any row reads, as a layer of a model does."""
        began = self._begin()
        plan, self._before = plan.filled(self._before), None
        self._move(self._pool, self._host, plan.swap_out)
        self._move(self._pool, self._pool, plan.copies)
        self._move(self._host, self._pool, plan.swap_in)
        for row in plan.rows:
            self._write(row)
        tokens = {}
        for row in plan.rows:
            if row.sampling is None:
                continue
            context = self._read(row)
            tokens[row.seq_id] = [self._sample(context, row)]
            for seq_id, sampling in row.forks:
                tokens[seq_id] = [self._sample(context, replace(row, sampling=sampling))]
        ended = self._end(plan, began)
        self._before = StepResult(plan.step, tokens, {}, ended - began)
        return self._before

    def _begin(self) -> float:
        """When this step begins, in monotonic seconds: it may be a little while ago."""
        self.steps += 1
        asked, self._asked = self._asked, None
        return max(time.monotonic() if asked is None else asked, self._free)

    def _end(self, plan: SchedulerOutput, began: float) -> float:
        """Wait for the end of the step, in monotonic seconds; what is slept too long is not the device's."""
        due = began + self.config.step_seconds + self.config.token_seconds * plan.num_tokens
        self._free = max(due, time.monotonic())
        while (wait := self._free - time.monotonic()) > 0 and not self._stop.wait(wait):
            pass
        return self._free

    def _move(self, source: array[int], target: array[int], pairs: tuple[tuple[int, int], ...]) -> None:
        size = self.config.block_size
        read = [source[a * size : (a + 1) * size] for a, _ in pairs]
        for (_, b), tokens in zip(pairs, read, strict=True):
            target[b * size : (b + 1) * size] = tokens

    def _write(self, row: ScheduledRow) -> None:
        size, pool, tokens = self.config.block_size, self._pool, array("i", row.token_ids)
        end = row.start + len(tokens)
        at = max(row.start, row.write_from)
        while at < end:
            block, offset = divmod(at, size)
            count = min(size - offset, end - at)
            slot = row.block_table[block] * size + offset
            assert slot + count <= len(pool), f"there is no block {row.block_table[block]}"
            pool[slot : slot + count] = tokens[at - row.start : at - row.start + count]
            at += count

    def _read(self, row: ScheduledRow) -> array[int]:
        """What the pool holds of positions ``0 .. start + len(token_ids) - 1``, through the block table."""
        size, pool = self.config.block_size, self._pool
        end = row.start + len(row.token_ids)
        context = array("i")
        for block in row.block_table:
            context += pool[block * size : (block + 1) * size]
        assert len(context) >= end, "the block table is too short"
        del context[end:]
        return context

    def _sample(self, context: array[int], row: ScheduledRow) -> SampledToken:
        assert row.sampling is not None
        if row.sampling.candidates:
            top = candidates(context, row.sampling, self.config.vocab_size)
            return SampledToken(top[0][0], top[0][1], top)
        token = self._token_fn(context, row)
        while token in row.sampling.forbidden_ids:
            token = (token + 1) % self.config.vocab_size
        n = row.sampling.params.logprobs
        return SampledToken(token, -0.5 if n is not None else None, ((token, -0.5),) if n else ())
