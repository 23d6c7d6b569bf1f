"""A Llama-family step on a GPU: matrix products by torch, all between them by the project's Triton kernels.

Importing it needs triton. The host prepares a step from plain lists, sends it in one transfer, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from chatsvc.models.attention.base import KVCache, StepLayout
from chatsvc.models.llama import LlamaModel
from kernels.triton.paged_attention import DevicePlan, paged_attention, wide_rows
from kernels.triton.plan import plan_attention
from kernels.triton.rms_norm import rms_norm
from kernels.triton.rotary_and_cache import rotary_and_cache
from kernels.triton.swiglu import swiglu
from kernels.triton.upload import Upload

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def send_step(
    layout: StepLayout,
    cache: KVCache,
    lists: Sequence[Iterable[int]],
    *,
    heads: int,
    dtype: torch.dtype,
    programs: int,
    cascade: bool,
) -> tuple[DevicePlan, list[torch.Tensor]]:
    """The plan of attention, and ``lists``, on the cache's device (int32), in one transfer.

    Args:
        heads: query heads.
        dtype: of q.
        programs, cascade: see :func:`kernels.triton.plan.plan_attention`.
    """
    _, _, _, block_size, kv_heads, dim = cache.data.shape
    plan = plan_attention(
        layout.query_lens,
        layout.seq_lens,
        layout.block_tables,
        block_size,
        group=heads // kv_heads,
        kv_heads=kv_heads,
        programs=programs,
        wide=wide_rows(dim, dtype),
        cascade=cascade,
    )
    upload = Upload()
    places = [upload.add(numbers) for numbers in lists]
    plan_places = DevicePlan.add(plan, upload)
    sent = upload.send(cache.data.device)
    return DevicePlan.take(plan, plan_places, sent), [sent[place] for place in places]


def views(cache: KVCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer as the kernels take them: fp8 as bytes."""
    k, v = cache.k(layer), cache.v(layer)
    return (k.view(torch.uint8), v.view(torch.uint8)) if cache.data.dtype == torch.float8_e4m3fn else (k, v)


def fp8_scales(cache: KVCache) -> torch.Tensor | None:
    """[2, num_kv_heads] ones for a pool of float8_e4m3fn: K and V are kept as they are, beyond 448 clipped."""
    if cache.data.dtype != torch.float8_e4m3fn:
        return None
    return torch.ones(2, cache.data.shape[4], dtype=torch.float32, device=cache.data.device)


class GpuModel:
    """A :class:`chatsvc.models.attention.base.FusedModel` over the weights of a :class:`LlamaModel`, which it shares.

    Args:
        model: float32, float16 or bfloat16.
        programs, cascade: see :func:`kernels.triton.plan.plan_attention`.
    """

    def __init__(self, model: LlamaModel, *, programs: int, cascade: bool) -> None:
        self.shape, self.dtype, self.device = model.shape, model.dtype, model.device
        self._model = model
        self._programs, self._cascade = programs, cascade

    def settle(self) -> None:
        """See :class:`chatsvc.models.attention.base.FusedModel`: nothing."""

    def step(
        self, ids: Sequence[int], positions: Sequence[int], layout: StepLayout, wanted: list[int], cache: KVCache
    ) -> torch.Tensor:
        """See :class:`chatsvc.models.attention.base.FusedModel`; the logits stay on the device."""
        config, weights = self._model.config, self._model.weights
        heads, kv_heads, eps = config.num_heads, config.num_kv_heads, config.rms_norm_eps
        scale = config.head_dim**-0.5
        plan, (ids_at, positions_at, slots, wanted_at) = send_step(
            layout,
            cache,
            (ids, positions, layout.slot_mapping, wanted),
            heads=heads,
            dtype=self.dtype,
            programs=self._programs,
            cascade=self._cascade,
        )
        angles = self._model.rotary.table(max(positions, default=0) + 1)
        scales = fp8_scales(cache)
        hidden = F.embedding(ids_at, weights.embed)
        normed = torch.empty_like(hidden)
        rms_norm(hidden, weights.layers[0].input_norm, eps, normed)
        after = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, after, strict=True)):
            k_cache, v_cache = views(cache, index)
            qkv = layer.qkv(normed).view(-1, heads + 2 * kv_heads, config.head_dim)
            rotary_and_cache(
                qkv, angles, positions_at, slots, k_cache, v_cache, layer.q_norm, layer.k_norm, eps, scales
            )
            q = qkv[:, :heads]
            attended = torch.empty_like(q, memory_format=torch.contiguous_format)
            paged_attention(q, k_cache, v_cache, plan, scale, attended, scales)
            rows = attended.flatten(1)
            if index == config.num_layers - 1:
                # What follows works row by row, and only these rows are asked for.
                rows, hidden = rows.index_select(0, wanted_at), hidden.index_select(0, wanted_at)
                normed = torch.empty_like(hidden)
            rms_norm(layer.o(rows), layer.post_norm, eps, normed, hidden)
            active = torch.empty(len(rows), config.intermediate_size, dtype=self.dtype, device=self.device)
            swiglu(layer.gate_up(normed), active)
            rms_norm(layer.down(active), next_norm, eps, normed, hidden)
        return F.linear(normed, weights.lm_head).float()
