"""Compile the Triton kernels for real GPUs, without one: ``python -m kernels.compile_check``.

The interpreter takes programs that the compiler refuses. This compiles every kernel ahead of time, down to machine code
through the ``ptxas`` of the triton wheel, and prints one JSON line per variant: registers and bytes of stack per thread
(a stack means that registers spill), bytes of shared memory per program. Exit status 1 when a variant fails, 2 when the
toolchain is not there.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

# Shared memory that one program may use, by compute capability (CUDA C++ Programming Guide, table of features).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
# Parameters that Triton must not see as divisible by 16.
UNALIGNED = {"num_seqs", "table_stride", "scale_log2"}


@dataclasses.dataclass(frozen=True)
class Variant:
    """One specialisation: what the JIT would build for tensors of this shape."""

    kernel: str
    dtype: str
    head_dim: int
    group: int = 1
    block_size: int = 16
    max_query_len: int = 1


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came out; ``stack`` in bytes per thread (spilled registers), ``shared`` in bytes per program."""

    capability: int
    registers: int
    stack: int
    shared: int


def variants(full: bool) -> Iterator[Variant]:
    """The default model's shapes and the extremes; ``full`` adds the grid of the kernel tests."""
    yield Variant("reshape_and_cache", "bf16", 64)
    yield Variant("reshape_and_cache", "fp32", 80, block_size=8)
    for query_len in (1, 64):
        yield Variant("paged_attention", "bf16", 64, 3, 16, query_len)
        yield Variant("paged_attention", "fp32", 64, 3, 16, query_len)
        yield Variant("paged_attention", "fp16", 256, 8, 8, query_len)
    if full:
        grid = itertools.product(("bf16", "fp32"), (40, 80, 96, 112, 128, 256), (1, 7), (1, 64))
        for dtype, dim, group, query_len in grid:
            yield Variant("paged_attention", dtype, dim, group, 128 if dim == 128 else 16, query_len)


def compile_variant(variant: Variant, capability: int) -> Compiled:
    """Compile for ``sm_<capability>``. Needs triton, and TRITON_INTERPRET unset when triton is imported."""
    import torch  # noqa: PLC0415  triton is optional, and so is this tool
    import triton  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    from kernels.triton import paged_attention, reshape_and_cache  # noqa: PLC0415

    constants: dict[str, Any] = {"BLOCK_SIZE": variant.block_size}
    if variant.kernel == "paged_attention":
        fn = paged_attention.paged_attention_kernel
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[variant.dtype]
        constants |= paged_attention.tile_shape(variant.group, variant.head_dim, dtype, variant.max_query_len)
    else:
        fn = reshape_and_cache.reshape_and_cache_kernel
        constants |= reshape_and_cache.tile_shape(3, variant.head_dim)

    signature, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name.endswith("_ptr"):
            is_index = name in ("slots_ptr", "block_tables_ptr", "query_starts_ptr", "seq_lens_ptr")
            signature[name] = "*i64" if is_index else f"*{variant.dtype}"
        else:
            signature[name] = "fp32" if name == "scale_log2" else "i32"
        if name not in UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    registers, stack = _resources(compiled.asm["cubin"])
    return Compiled(capability, registers, stack, int(compiled.metadata.shared))


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) per thread, as ``cuobjdump`` reads them from the machine code."""
    from triton import knobs  # noqa: PLC0415  triton is optional

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    if found is None:
        raise ValueError(f"cuobjdump printed no resources: {printed!r}")
    return int(found[1]), int(found[2])


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_check", description=__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], choices=sorted(SHARED_MEMORY))
    parser.add_argument("--full", action="store_true", help="the whole grid of the kernel tests")
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed", file=sys.stderr)
        return 2
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that its default will change
    status = 0
    for variant, capability in itertools.product(variants(options.full), options.capability):
        line: dict[str, Any] = dataclasses.asdict(variant)
        try:
            compiled = compile_variant(variant, capability)
        except (ImportError, FileNotFoundError) as error:
            print(f"the toolchain is not complete: {error}", file=sys.stderr)
            return 2
        except Exception as error:
            line |= {"capability": capability, "error": f"{type(error).__name__}: {error}"}
            status = 1
        else:
            line |= dataclasses.asdict(compiled)
            if compiled.shared > SHARED_MEMORY[capability]:
                line["error"] = "needs more shared memory than a program may use"
                status = 1
        print(json.dumps(line), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
