"""Attention over paged KV with the project's compiled CPU kernels, and the whole step in one call where they can."""

from __future__ import annotations

import logging
import os
import time
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from chatsvc.models.attention.base import FusedModel, KVCache, StepLayout
from chatsvc.models.attention.torch_backend import TorchBackend
from chatsvc.models.base import CausalLM
from chatsvc.models.cpu_step import CpuModel, sequences_of
from chatsvc.models.cpu_weights import FileWeights, MemoryWeights, Weights
from chatsvc.models.llama import LlamaModel
from chatsvc.models.rotary import Rotary
from chatsvc.models.weights import OpenModel
from kernels.cpu.library import KEPT, Attention, Library

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CpuMeta:
    """The layout as the kernels read it: int64, and the number of sequences."""

    packed: array[int]
    sequences: int


class CpuBackend:
    """float32 on a CPU, over a pool of float32 or of 16 bits; what the kernels cannot read goes to
    :class:`TorchBackend`, call by call.

    A request's logits have the same bits whatever runs beside it, whatever the block size, wherever chunks fell, with
    any number of threads (``contract``: Exactness).

    Args:
        threads: None: as many as this process may use.
        int8: models that are taken over multiply whole numbers in their linear layers.
    """

    def __init__(self, library: Library, threads: int | None = None, int8: bool = False) -> None:
        self.name = "cpu" + "-int8" * int8 + "-tiles" * library.tiles
        self.library = library
        self.threads = threads or _usable_cpus()
        self.int8 = int8
        self._torch = TorchBackend()
        self._attention: Attention | None = None

    @property
    def products(self) -> str:
        """What linear layers are computed with, for people."""
        if self.int8:
            return f"int8 products ({self.library.low_simd})"
        parts = ", amx-bf16 in parts" if self.library.tiles else ""
        return f"float32 products ({self.library.simd}{parts})"

    def load(self, model: OpenModel, dtype: torch.dtype) -> FusedModel | None:
        """The model packed straight from its files, or None: the caller reads it. Raises: ModelError, MemoryError."""
        if dtype != torch.float32:
            return None
        began = time.perf_counter()
        packed = self._pack(FileWeights(model), Rotary(model.config, torch.device("cpu"), model.rope_factors))
        seconds = time.perf_counter() - began
        log.info("weights: %d MiB, packed in %.2f s, %s", packed.weight_bytes >> 20, seconds, self.products)
        return packed

    def fuse(self, model: CausalLM | FusedModel) -> CausalLM | FusedModel:
        """The model packed for a step in one call, or the model itself when the kernels do not know its kind."""
        if isinstance(model, LlamaModel) and model.dtype == torch.float32 and model.device.type == "cpu":
            return self._pack(MemoryWeights(model), model.rotary)
        return model

    def _pack(self, weights: Weights, rotary: Rotary) -> CpuModel:
        return CpuModel(self.library, weights, rotary, self.threads, self.int8)

    def arithmetic(self, cache: KVCache) -> str:
        """See :class:`AttentionBackend`."""
        short = cache.data.dtype == torch.bfloat16 and cache.data.shape[-1] % 32 == 0
        return self.name + "-bf16" * (short and self.library.bf16_simd == "avx512-bf16")

    def prepare(self, layout: StepLayout, cache: KVCache) -> Any:
        """See :class:`AttentionBackend`."""
        if not _served(cache.data):
            return self._torch.prepare(layout, cache)
        return CpuMeta(sequences_of(layout).pack(), len(layout.query_lens))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        cache: KVCache,
        meta: Any,
        scale: float,
    ) -> torch.Tensor:
        """See :class:`AttentionBackend`."""
        if not isinstance(meta, CpuMeta):
            return self._torch.forward(q, k, v, layer, cache, meta, scale)
        if self._attention is None:
            self._attention = Attention(self.library, self.threads)
        out = torch.empty(q.shape)
        rows = (_rows(q), _rows(k), _rows(v))
        self._attention(meta.packed, meta.sequences, *rows, cache.data, layer, scale, out)
        return out.to(q.dtype)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _served(data: torch.Tensor) -> bool:
    return data.dtype in KEPT and data.device.type == "cpu" and data.is_contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] whose rows of heads x dim lie together; any stride between rows."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
