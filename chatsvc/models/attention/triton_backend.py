"""Attention over paged KV with the project's Triton kernels; importing it needs triton (see ``select``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chatsvc.models.attention.base import FusedModel, KVCache, StepLayout
from chatsvc.models.base import CausalLM
from chatsvc.models.gpu_step import DTYPES, GpuModel, fp8_scales, send_step, views
from chatsvc.models.llama import LlamaModel
from chatsvc.models.weights import OpenModel
from kernels.triton.paged_attention import DevicePlan, paged_attention
from kernels.triton.reshape_and_cache import reshape_and_cache

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

    def arithmetic(self, cache: KVCache) -> str:
        """See :class:`AttentionBackend`."""
        return self.name

    def load(self, model: OpenModel, dtype: torch.dtype) -> FusedModel | None:
        """None: the weights are read as for torch, and :meth:`fuse` shares them."""
        return None

    def fuse(self, model: CausalLM | FusedModel) -> CausalLM | FusedModel:
        """The model with all its small operations in kernels, or the model itself when they do not know its kind."""
        if isinstance(model, LlamaModel) and model.dtype in DTYPES:
            return GpuModel(model, programs=self.programs(model.device), cascade=self.cascade)
        return model

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
            meta.plan, (meta.slots,) = send_step(
                meta.layout,
                cache,
                (meta.layout.slot_mapping,),
                heads=q.shape[1],
                dtype=q.dtype,
                programs=self.programs(q.device),
                cascade=self.cascade,
            )
        k_cache, v_cache = views(cache, layer)
        scales = fp8_scales(cache)
        reshape_and_cache(k, v, k_cache, v_cache, meta.slots, scales)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        paged_attention(q, k_cache, v_cache, meta.plan, scale, out, scales)
        return out
