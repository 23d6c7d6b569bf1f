"""Compile the Triton kernels for real GPUs, without one: ``python -m kernels.compile_check``.

The interpreter takes programs that the compiler refuses. This compiles every kernel ahead of time, down to machine
code, for NVIDIA sm_80, sm_90 and sm_100 and AMD gfx942, and prints a table: registers per thread / bytes that spill out
of them / KiB of shared memory per program. Exit status 1 when a variant fails or spills, 2 without the toolchain.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from kernels.variants import Variant, variants

# Shared memory that one program may use (CUDA C++ Programming Guide, table of features; AMD CDNA3 ISA guide: LDS).
TARGETS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came out: registers and bytes spilled per thread, bytes of shared memory per program, or why nothing did."""

    target: str
    kernel: str
    variant: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    error: str = ""


def compile_variant(variant: Variant, target: str) -> Compiled:
    """Compile for ``target``. Needs triton, and TRITON_INTERPRET unset when triton is imported."""
    import triton  # noqa: PLC0415  triton is optional, and so is this tool
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource  # noqa: PLC0415

    fn = variant.kernel()
    signature, attributes = {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in variant.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = variant.types.get(name, "*fp32" if name.endswith("_ptr") else "i32")
        if name not in variant.unaligned and not signature[name].startswith("fp"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=fn, signature=signature, constexprs=variant.constants, attrs=attributes)
    amd = target.startswith("gfx")
    gpu = GPUTarget("hip", target, 64) if amd else GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
    log = io.StringIO()
    with contextlib.redirect_stdout(log):  # where ptxas -v goes
        compiled = triton.compile(source, target=gpu, options={"num_warps": variant.num_warps})
    registers, spilled = _amd_resources(compiled.asm["amdgcn"]) if amd else _nvidia_resources(log.getvalue())
    shared = int(compiled.metadata.shared)
    error = f"spills {spilled} bytes" if spilled else ""
    if shared > TARGETS[target]:
        error = f"needs {shared} bytes of shared memory, a program may use {TARGETS[target]}"
    return Compiled(target, variant.name, variant.label, registers, spilled, shared, error)


def _nvidia_resources(log: str) -> tuple[int, int]:
    """(registers, bytes spilled) per thread out of ``ptxas -v``."""
    registers = re.findall(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if not registers or not spills:
        raise ValueError(f"ptxas printed no resources: {log!r}")
    return max(map(int, registers)), sum(map(int, spills))


def _amd_resources(assembly: str) -> tuple[int, int]:
    """(registers, bytes spilled) per thread out of the metadata of the assembly."""

    def number(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        if found is None:
            raise ValueError(f"the assembly has no .{name}")
        return int(found[1])

    # Vector registers, those of the matrix units among them. Scalar ones spill into lanes of these.
    return number("vgpr_count"), 4 * number("vgpr_spill_count") + number("private_segment_fixed_size")


def _compile(task: tuple[int, str, str]) -> Compiled:
    index, level, target = task
    variant = list(variants(level))[index]
    try:
        return compile_variant(variant, target)
    except Exception as error:
        return Compiled(target, variant.name, variant.label, error=f"{type(error).__name__}: {error}"[:500])


def _prepare() -> None:
    """Before triton is imported."""
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DUMP_PTXAS_LOG"] = os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # unset, Triton 3.9 warns that its default will change


def compile_all(level: str, targets: Iterable[str], jobs: int) -> Iterator[Compiled]:
    """Every variant for every target."""
    _prepare()
    tasks = [(i, level, target) for i in range(len(list(variants(level)))) for target in targets]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_prepare) as pool:
        yield from pool.map(_compile, tasks)


def table(results: list[Compiled]) -> str:
    """A Markdown table: one line per variant; for each target registers / bytes spilled / KiB shared."""
    targets = list(dict.fromkeys(r.target for r in results))
    lines = [f"| kernel | variant | {' | '.join(targets)} |", "| --- | --- |" + " --- |" * len(targets)]
    cells: dict[tuple[str, str], list[str]] = {}
    for r in results:
        cell = f"{r.registers} / {r.spilled} / {r.shared / 1024:.0f}" if r.registers else "failed"
        cells.setdefault((r.kernel, r.variant), []).append(cell)
    lines += [f"| {kernel} | {variant} | {' | '.join(c)} |" for (kernel, variant), c in cells.items()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m kernels.compile_check", description=__doc__)
    parser.add_argument("--target", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    level = parser.add_mutually_exclusive_group()
    level.add_argument("--quick", dest="level", action="store_const", const="quick", help="each kernel, fewer shapes")
    level.add_argument("--full", dest="level", action="store_const", const="full", help="a large grid (many minutes)")
    parser.add_argument("--json", action="store_true", help="one JSON line per variant and target")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("triton") is None:
        print("triton is not installed", file=sys.stderr)
        return 2
    results = []
    for result in compile_all(options.level or "table", options.target, options.jobs):
        results.append(result)
        if options.json:
            print(json.dumps(dataclasses.asdict(result)), flush=True)
    failed = [r for r in results if r.error]
    if not options.json:
        print(table(results))
    for r in failed:
        print(f"{r.target} {r.kernel} {r.variant}: {r.error}", file=sys.stderr)
    if any(r.error.startswith(("ImportError", "FileNotFoundError", "ModuleNotFoundError")) for r in failed):
        return 2
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
