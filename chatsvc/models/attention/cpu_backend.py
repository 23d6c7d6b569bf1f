"""Attention over paged KV with the project's compiled CPU kernels, and the whole step in one call where they can."""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import Any

import torch

from chatsvc.models.attention.base import FusedModel, KVCache, StepLayout
from chatsvc.models.attention.torch_backend import TorchBackend
from chatsvc.models.base import CausalLM
from chatsvc.models.cpu_step import CpuModel, sequences_of
from chatsvc.models.llama import LlamaModel
from kernels.cpu.library import Attention, Library


@dataclass(frozen=True, slots=True)
class CpuMeta:
    """The layout as the kernels read it: int64, and the number of sequences."""

    packed: array[int]
    sequences: int


class CpuBackend:
    """float32 on a CPU; other dtypes go to :class:`TorchBackend`, call by call.

    A request's logits have the same bits whatever runs beside it, whatever the block size, wherever chunks fell, with
    any number of threads (``contract``: Exactness).

    Args:
        threads: None: as many as this process may use.
    """

    name = "cpu"

    def __init__(self, library: Library, threads: int | None = None) -> None:
        self.library = library
        self.threads = threads or _usable_cpus()
        self._torch = TorchBackend()
        self._attention: Attention | None = None

    def fuse(self, model: CausalLM | FusedModel) -> CausalLM | FusedModel:
        """The model packed for a step in one call, or the model itself when the kernels do not know its kind."""
        if isinstance(model, LlamaModel) and model.dtype == torch.float32 and model.device.type == "cpu":
            return CpuModel(self.library, model, self.threads)
        return model

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
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        rows = (_rows(q), _rows(k), _rows(v))
        self._attention(meta.packed, meta.sequences, *rows, cache.data, layer, scale, out)
        return out


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _served(data: torch.Tensor) -> bool:
    return data.dtype == torch.float32 and data.device.type == "cpu" and data.is_contiguous()


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[T, heads, dim] whose rows of heads x dim lie together; any stride between rows."""
    x = x.float()
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
