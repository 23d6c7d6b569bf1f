"""The Triton kernels that are compiled ahead of time: what the JIT would build for these shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Variant:
    """Attributes:
    name, label: of the kernel, and of its shape for the table.
    module, function: where the kernel is.
    constants: its compile-time parameters; None for a pointer that is not there.
    types: Triton's names of the other parameters' types; by default pointers are ``*fp32`` and numbers ``i32``.
    unaligned: parameters that Triton must not see as divisible by 16.
    """

    name: str
    label: str
    module: str
    function: str
    constants: Mapping[str, Any]
    types: Mapping[str, str] = field(default_factory=dict)
    unaligned: frozenset[str] = frozenset()
    num_warps: int = 4

    def kernel(self) -> Any:
        """The jitted function. Imports triton."""
        return getattr(import_module(f"kernels.triton.{self.module}"), self.function)


def variants(level: str) -> Iterator[Variant]:
    """Every kernel in the shapes of well-known models and at the extremes. Imports triton.

    ``level``: "quick" (every kernel), "table" (more shapes), "full" (a grid).
    """
    # dtype of q, dtype of the cache, head dim, group, block size, several tokens in a tile
    yield _attention("bf16", "bf16", 64, 3, 16, wide=True)
    yield _attention("bf16", "bf16", 128, 4, 16, wide=False)
    yield _attention("bf16", "u8", 128, 8, 32, wide=True)
    yield _merge("bf16", 128, 32)
    yield _rotary("bf16", "bf16", 32, 8, 128, normed=True)
    yield _rotary("bf16", "u8", 9, 3, 64, normed=False)
    yield _cache("fp32", "u8", 8, 80)
    ids = {"source_ptr": "*i64", "target_ptr": "*i64", "source_ids_ptr": "*i32", "target_ids_ptr": "*i32"}
    yield Variant("copy_blocks", "", "copy_blocks", "copy_blocks_kernel", _block("copy_blocks"), ids)
    yield _norm("bf16", 4096)
    halves = {"gate_up_ptr": "*bf16", "out_ptr": "*bf16"}
    yield Variant("swiglu", "bf16", "swiglu", "swiglu_kernel", _block("swiglu"), halves)
    yield from _sampling()
    if level == "quick":
        return
    yield _attention("bf16", "bf16", 64, 3, 16, wide=False)
    yield _attention("bf16", "bf16", 128, 4, 16, wide=True)
    yield _attention("fp16", "fp16", 256, 8, 8, wide=True)
    yield _attention("fp32", "fp32", 80, 1, 128, wide=True)
    yield _cache("bf16", "bf16", 3, 64)
    yield _norm("fp32", 576)
    if level == "table":
        return
    grid = itertools.product(("bf16", "fp16", "fp32"), (64, 80, 96, 128, 256), (1, 7), (False, True))
    for dtype, dim, group, wide in grid:
        yield _attention(dtype, dtype, dim, group, 128 if dim == 128 else 16, wide=wide)
        if dtype != "fp32":
            yield _attention(dtype, "u8", dim, group, 8, wide=wide)
    for width in (64, 896, 1024, 2048, 5120, 8192, 16384):
        yield _norm("bf16", width)


def _block(module: str) -> dict[str, int]:
    return {"BLOCK": _attribute(module, "BLOCK")}


def _attribute(module: str, name: str) -> Any:
    return getattr(import_module(f"kernels.triton.{module}"), name)


def _attention(dtype: str, cache: str, dim: int, group: int, block_size: int, *, wide: bool) -> Variant:
    torch_dtype = getattr(import_module("torch"), {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype])
    rows = max(
        _attribute("paged_attention", "wide_rows")(dim, torch_dtype) if wide else 16, 1 << (group - 1).bit_length()
    )
    fp8 = cache == "u8"
    shape = _attribute("paged_attention", "tile_shape")(group, 8, dim, torch_dtype, rows, fp8=fp8)
    constants = {"BLOCK_SIZE": block_size} | shape | ({} if fp8 else {"fp8_scales_ptr": None})
    types = {f"{name}_ptr": f"*{dtype}" for name in ("q", "out")}
    types |= {f"{name}_cache_ptr": f"*{cache}" for name in ("k", "v")}
    types |= {f"{name}_ptr": "*i32" for name in ("pieces", "rows", "tables")} | {"scale_log2": "fp32"}
    label = f"{dtype}, KV {'e4m3' if fp8 else cache}, dim {dim}, group {group}, {rows} rows"
    warps = _attribute("paged_attention", "num_warps")(dim, torch_dtype, rows, fp8=fp8)
    kernel = "paged_attention_kernel"
    return Variant("paged_attention", label, "paged_attention", kernel, constants, types, num_warps=warps)


def _merge(dtype: str, dim: int, heads: int) -> Variant:
    constants = {"HEADS": heads, "HEAD_DIM": dim, "DIM_PADDED": 1 << (dim - 1).bit_length()}
    types = {"merges_ptr": "*i32", "out_ptr": f"*{dtype}"}
    return Variant("merge", f"{dtype}, dim {dim}", "paged_attention", "merge_kernel", constants, types, num_warps=1)


def _rotary(dtype: str, cache: str, heads: int, kv_heads: int, dim: int, *, normed: bool) -> Variant:
    fp8 = cache == "u8"
    shape = _attribute("rotary_and_cache", "tile_shape")(heads, kv_heads, dim, normed=normed, fp8=fp8)
    constants = {"BLOCK_SIZE": 16} | shape | ({} if fp8 else {"fp8_scales_ptr": None})
    types = {"qkv_ptr": f"*{dtype}", "eps": "fp32", "positions_ptr": "*i32", "slots_ptr": "*i32"}
    types |= {"k_cache_ptr": f"*{cache}", "v_cache_ptr": f"*{cache}"}
    if normed:
        types |= {"q_norm_ptr": f"*{dtype}", "k_norm_ptr": f"*{dtype}"}
    else:
        constants |= {"q_norm_ptr": None, "k_norm_ptr": None}
    label = f"{dtype}, KV {'e4m3' if fp8 else cache}, dim {dim}{', normed' if normed else ''}"
    return Variant("rotary_and_cache", label, "rotary_and_cache", "rotary_and_cache_kernel", constants, types)


def _cache(dtype: str, cache: str, kv_heads: int, dim: int) -> Variant:
    fp8 = cache == "u8"
    shape = _attribute("reshape_and_cache", "tile_shape")(kv_heads, dim, fp8=fp8)
    constants = {"BLOCK_SIZE": 16} | shape | ({} if fp8 else {"fp8_scales_ptr": None})
    types = {"k_ptr": f"*{dtype}", "v_ptr": f"*{dtype}", "slots_ptr": "*i32"}
    types |= {"k_cache_ptr": f"*{cache}", "v_cache_ptr": f"*{cache}"}
    label = f"{dtype}, KV {'e4m3' if fp8 else cache}, dim {dim}"
    return Variant("reshape_and_cache", label, "reshape_and_cache", "reshape_and_cache_kernel", constants, types)


def _norm(dtype: str, width: int) -> Variant:
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr"), f"*{dtype}") | {"eps": "fp32"}
    constants = {"ADD": True} | _attribute("rms_norm", "tile_shape")(width)
    warps = _attribute("rms_norm", "num_warps")(width)
    return Variant(
        "rms_norm", f"{dtype}, width {width}", "rms_norm", "rms_norm_kernel", constants, types, num_warps=warps
    )


def _sampling() -> Iterator[Variant]:
    types = dict.fromkeys(("sums_ptr", "reals_ptr", "out_reals_ptr"), "*fp64")
    types |= {"out_ptr": "*i64", "top_k_ptr": "*i32", "ranks_ptr": "*i32", "edits_ptr": "*i32"}
    odd = frozenset({"stride", "size", "out_stride", "count", "most"})
    for name in ("look", "draw", "rank", "edit"):
        block = "EDITS" if name == "edit" else "BLOCK"
        yield Variant(
            f"sample: {name}",
            "",
            "sampling",
            f"{name}_kernel",
            {block: _attribute("sampling", block)},
            types,
            odd,
            num_warps=4 if name == "edit" else 8,
        )
