"""One step of a real model: rows in, tokens out. Keeps no state about requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from chatsvc.models.attention.base import AttentionBackend, FusedModel, FusingBackend, KVCache, StepLayout
from chatsvc.models.base import CausalLM
from chatsvc.runtime.sampler import sample
from chatsvc.scheduler.plan import SampledToken, SamplingRow, ScheduledRow, SchedulerOutput, StepResult

log = logging.getLogger(__name__)


def layout_of(rows: tuple[ScheduledRow, ...], block_size: int) -> StepLayout:
    """The step's flat batch as attention wants it."""
    slots: list[int] = []
    for row in rows:
        for p in range(row.start, row.start + len(row.token_ids)):
            written = p >= row.write_from
            slots.append(row.block_table[p // block_size] * block_size + p % block_size if written else -1)
    return StepLayout(
        query_lens=[len(r.token_ids) for r in rows],
        seq_lens=[r.start + len(r.token_ids) for r in rows],
        block_tables=[r.block_table for r in rows],
        slot_mapping=slots,
    )


def move(source: KVCache, target: KVCache, pairs: tuple[tuple[int, int], ...]) -> None:
    """Copy whole blocks, all layers in one call; every source is read before any target is written."""
    if pairs:
        table = torch.tensor(pairs, dtype=torch.int64)
        blocks = source.data[table[:, 0].to(source.data.device)]
        target.data[table[:, 1].to(target.data.device)] = blocks.to(target.data.device)


def read_blocks(cache: KVCache, ids: Sequence[int]) -> memoryview:
    """Bytes of whole blocks, one after the other."""
    blocks = cache.data[torch.tensor(ids, dtype=torch.int64, device=cache.data.device)]
    return memoryview(blocks.cpu().flatten().view(torch.uint8).numpy().data)


def write_blocks(cache: KVCache, ids: Sequence[int], data: bytes) -> None:
    """The reverse of :func:`read_blocks`."""
    target = cache.data
    # bytearray: torch warns of memory that it must not write to, although nothing here writes to it.
    blocks = torch.frombuffer(bytearray(data), dtype=target.dtype).view(len(ids), *target.shape[1:])
    target[torch.tensor(ids, dtype=torch.int64, device=target.device)] = blocks.to(target.device)


class Moves(Protocol):
    """The moves of blocks in a plan."""

    def begin(self, plan: SchedulerOutput) -> None:
        """Before the forward pass; what it reads and writes on the device is in order."""
        ...

    def end(self) -> None:
        """When the step is over, or has failed: afterwards the host tier is up to date."""
        ...


class PlainMoves:
    """Done at once."""

    def __init__(self, cache: KVCache, host: KVCache | None) -> None:
        self._cache, self._host = cache, host

    def begin(self, plan: SchedulerOutput) -> None:
        if self._host is not None:
            move(self._cache, self._host, plan.swap_out)
        move(self._cache, self._cache, plan.copies)
        if self._host is not None:
            move(self._host, self._cache, plan.swap_in)

    def end(self) -> None:
        pass


Sampler = Callable[[torch.Tensor, Sequence[SamplingRow]], list[SampledToken | str]]


def around(backend: AttentionBackend, cache: KVCache, host: KVCache | None) -> tuple[Sampler, Moves]:
    """What comes after the forward pass and before it: on the device where the backend has kernels for them."""
    if backend.name != "triton":
        return sample, PlainMoves(cache, host)
    from chatsvc.runtime.device_blocks import DeviceMoves  # noqa: PLC0415  triton is optional
    from chatsvc.runtime.device_sampler import sample as sample_on_device  # noqa: PLC0415

    return sample_on_device, DeviceMoves(cache, host)


class ModelRunner:
    """Runs steps in order, and remembers of the last one what it sampled.

    A backend that can run the whole step takes the model over: ``model`` is then its packed copy.

    ``host`` is the memory of the host tier: shaped as ``cache``, but on the CPU.
    """

    def __init__(
        self, model: CausalLM | FusedModel, backend: AttentionBackend, cache: KVCache, host: KVCache | None = None
    ) -> None:
        self.model = backend.fuse(model) if isinstance(backend, FusingBackend) else model
        self.backend = backend
        self.cache = cache
        self.host = host
        self._scale = model.shape.head_dim**-0.5
        self._sample, self._moves = around(backend, cache, host)
        self._before: StepResult | None = None

    @torch.inference_mode()
    def logits(self, rows: tuple[ScheduledRow, ...]) -> tuple[torch.Tensor, list[tuple[int, SamplingRow]]]:
        """Forward; logits [R, V] of everything that samples, and whose they are: (seq_id, how), forks included."""
        layout = layout_of(rows, self.cache.block_size)
        ids = [t for r in rows for t in r.token_ids]
        positions = [p for r in rows for p in range(r.start, r.start + len(r.token_ids))]
        sampled: list[tuple[int, SamplingRow]] = []
        wanted: list[int] = []
        last = -1
        for row in rows:
            last += len(row.token_ids)
            if row.sampling is not None:
                here = [(row.seq_id, row.sampling), *row.forks]
                sampled += here
                wanted += [last] * len(here)
        if isinstance(self.model, FusedModel):
            return self.model.step(ids, positions, layout, wanted, self.cache), sampled
        return self._unfused(self.model, ids, positions, layout, wanted), sampled

    def _unfused(
        self, model: CausalLM, ids: list[int], positions: list[int], layout: StepLayout, wanted: list[int]
    ) -> torch.Tensor:
        meta = self.backend.prepare(layout, self.cache)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return self.backend.forward(q, k, v, layer, self.cache, meta, self._scale)

        ids_at, positions_at, rows_at = (
            torch.tensor(x, dtype=torch.int64, device=model.device) for x in (ids, positions, wanted)
        )
        return model.forward(ids_at, positions_at, attend, rows_at)

    @torch.inference_mode()
    def run(self, plan: SchedulerOutput) -> StepResult:
        began = time.perf_counter()
        plan, self._before = plan.filled(self._before), None
        try:
            self._moves.begin(plan)
            tokens, errors = self._tokens(plan.rows)
        finally:
            self._moves.end()
        self._before = StepResult(plan.step, tokens, errors, time.perf_counter() - began)
        return self._before

    def _tokens(self, rows: tuple[ScheduledRow, ...]) -> tuple[dict[int, list[SampledToken]], dict[int, str]]:
        logits, sampled = self.logits(rows)
        tokens: dict[int, list[SampledToken]] = {}
        errors: dict[int, str] = {}
        if sampled:
            for (seq_id, _), outcome in zip(sampled, self._sample(logits, [how for _, how in sampled]), strict=True):
                if isinstance(outcome, str):
                    log.warning("a request ends: %s (sequence %d)", outcome, seq_id)
                    errors[seq_id] = outcome
                else:
                    tokens[seq_id] = [outcome]
        return tokens, errors
