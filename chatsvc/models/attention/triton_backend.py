"""Attention over paged KV with the project's Triton kernels; importing it needs triton (see ``select``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chatsvc.models.attention.base import KVCache, StepLayout
from kernels.triton.paged_attention import DevicePlan, paged_attention, wide_rows
from kernels.triton.plan import plan_attention
from kernels.triton.reshape_and_cache import reshape_and_cache
from kernels.triton.upload import Upload

# Programs that one multiprocessor can keep in flight: fewer than that times the multiprocessors, and keys are split.
PROGRAMS_PER_PROCESSOR = 4


@dataclass(slots=True)
class TritonMeta:
    """One step; what is on the device follows with the first layer, which knows the number of query heads.

    Attributes:
        slots: [T] int32.
    """

    layout: StepLayout
    slots: torch.Tensor | None = None
    plan: DevicePlan | None = None


class TritonBackend:
    """CUDA, or a CPU with Triton's interpreter (``TRITON_INTERPRET=1`` before triton is imported).

    Args:
        cascade: read prefixes that sequences share once.
        programs: how many programs keep the device busy; None: asked of the device.
    """

    name = "triton"

    def __init__(self, *, cascade: bool = True, programs: int | None = None) -> None:
        self.cascade = cascade
        self._programs = programs

    def programs(self, device: torch.device) -> int:
        """How many programs keep the device busy."""
        if self._programs is None:
            processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
            self._programs = PROGRAMS_PER_PROCESSOR * processors
        return self._programs

    def prepare(self, layout: StepLayout, cache: KVCache) -> TritonMeta:
        """See :class:`AttentionBackend`."""
        return TritonMeta(layout)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        cache: KVCache,
        meta: TritonMeta,
        scale: float,
    ) -> torch.Tensor:
        """See :class:`AttentionBackend`. A pool of float8_e4m3fn holds K and V as they are, beyond 448 clipped."""
        if meta.plan is None or meta.slots is None:
            meta.plan, meta.slots = self._send(meta.layout, q, k, cache)
        k_cache, v_cache = cache.k(layer), cache.v(layer)
        scales = None
        if cache.data.dtype == torch.float8_e4m3fn:
            k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
            scales = torch.ones(2, k.shape[1], dtype=torch.float32, device=q.device)
        reshape_and_cache(k, v, k_cache, v_cache, meta.slots, scales)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_attention(q, k_cache, v_cache, meta.plan, scale, out, scales)
        return out

    def _send(
        self, layout: StepLayout, q: torch.Tensor, k: torch.Tensor, cache: KVCache
    ) -> tuple[DevicePlan, torch.Tensor]:
        kv_heads = k.shape[1]
        plan = plan_attention(
            layout.query_lens,
            layout.seq_lens,
            layout.block_tables,
            cache.block_size,
            group=q.shape[1] // kv_heads,
            kv_heads=kv_heads,
            programs=self.programs(q.device),
            wide=wide_rows(q.shape[2], q.dtype),
            cascade=self.cascade,
        )
        upload = Upload()
        slots = upload.add(layout.slot_mapping)
        places = DevicePlan.add(plan, upload)
        sent = upload.send(q.device)
        return DevicePlan.take(plan, places, sent), sent[slots]
