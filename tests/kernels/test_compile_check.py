"""The Triton kernels compile for real GPUs, here without one: the interpreter takes programs that compilers refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import compile_check
from kernels.compile_check import Compiled


@pytest.mark.slow
def test_kernels_compile_for_every_target_and_spill_nothing(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_check", "--json", "--quick"],
        capture_output=True,
        text=True,
        timeout=280,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(compile_check.__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    found = [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]
    kernels = {result.kernel for result in found}
    assert {"paged_attention", "merge", "rotary_and_cache", "sample: draw", "copy_blocks"} <= kernels
    assert {(r.kernel, r.target) for r in found} == {(k, t) for k in kernels for t in compile_check.TARGETS}
    assert [r for r in found if r.spilled or r.error or not 0 < r.registers <= 512] == []


def test_a_spill_is_found_in_what_ptxas_prints() -> None:
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\n"
        "    64 bytes stack frame, 40 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers\n"
    )
    assert compile_check._nvidia_resources(log) == (255, 64)
    with pytest.raises(ValueError, match="no resources"):
        compile_check._nvidia_resources("")


def test_a_spill_is_found_in_the_metadata_of_the_amd_assembly() -> None:
    text = ".vgpr_count: 130\n .vgpr_spill_count: 3\n.private_segment_fixed_size: 16\n"
    assert compile_check._amd_resources(text) == (130, 28)
    with pytest.raises(ValueError, match="vgpr_spill_count"):
        compile_check._amd_resources(".vgpr_count: 1\n")


def test_table_and_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    results = [
        Compiled("sm_80", "k", "bf16", 40, 0, 2048),
        Compiled("gfx942", "k", "bf16", 255, 8, 0, "spills 8 bytes"),
    ]
    monkeypatch.setattr(compile_check, "compile_all", lambda *_: iter(results))
    assert compile_check.main([]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[2] == "| k | bf16 | 40 / 0 / 2 | 255 / 8 / 0 |"
    assert "gfx942 k bf16: spills 8 bytes" in err
    del results[1]
    assert compile_check.main([]) == 0
