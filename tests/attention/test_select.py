"""A backend that this machine cannot run is refused at start, with a sentence that helps."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.base import KVCache
from chatsvc.models.attention.cpu_backend import CpuBackend
from chatsvc.models.attention.select import BACKENDS, make_backend
from kernels.cpu.build import compiler
from kernels.cpu.library import Library


def test_every_name_answers_or_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    for name in BACKENDS:
        try:
            backend = make_backend(name, "cpu")
        except ConfigError as error:
            assert name in ("cpu", "triton")
            assert f"--attention-backend {name}" in str(error)
            assert "torch" in str(error)
        else:
            assert backend.name in (("cpu", "cpu-tiles") if name in ("auto", "cpu") and compiler() else ("torch",))


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"flash.*auto, torch, cpu, triton"):
        make_backend("flash", "cpu")


def test_without_a_compiler_auto_is_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert make_backend("auto", "cpu").name == "torch"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"--attention-backend cpu: no C\+\+ compiler.*use torch"):
        make_backend("cpu", "cpu")


def test_a_compiler_that_fails_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert make_backend("auto", "cpu").name == "torch"
    assert "no such thing" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_kernels_that_compute_wrongly_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A compiler that "succeeds" with a library that cannot be loaded: the check after the build refuses it."""
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\nwhile [ $# -gt 0 ]; do if [ $1 = -o ]; then echo junk > $2; fi; shift; done\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert make_backend("auto", "cpu").name == "torch"
    assert "fail their check" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_compiled_kernels_are_for_float32_on_a_cpu() -> None:
    assert make_backend("auto", "cpu", dtype=torch.bfloat16).name == "torch"
    with pytest.raises(ConfigError, match="the model is on cuda"):
        make_backend("cpu", "cuda")


def test_int8_is_done_by_the_compiled_kernels_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("torch", "triton"):
        with pytest.raises(ConfigError, match=f"--quantization int8.*--attention-backend {name}"):
            make_backend(name, "cpu", int8=True)
    with pytest.raises(ConfigError, match=r"--quantization int8 is for float32 on a CPU.*bfloat16 on cpu"):
        make_backend("auto", "cpu", dtype=torch.bfloat16, int8=True)
    with pytest.raises(ConfigError, match="float32 on cuda"):
        make_backend("auto", "cuda", int8=True)
    if compiler():
        names = {make_backend(name, "cpu", int8=True).name for name in ("auto", "cpu")}
        assert names in ({"cpu-int8"}, {"cpu-int8-tiles"})
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--quantization int8 needs the compiled CPU kernels: no C\+\+ compiler"):
        make_backend("auto", "cpu", int8=True)


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        make_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_backend("triton", torch.device("cpu")).name == "triton"


def test_what_no_gpu_has_run_is_not_chosen_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    caplog.set_level("INFO")
    assert make_backend("auto", "cuda").name == "torch"
    assert "--attention-backend triton" in caplog.text


def test_triton_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; install chatsvc\[triton\]"):
        make_backend("triton", "cuda")
    assert make_backend("auto", "cuda").name == "torch"


def test_without_triton_a_cpu_server_starts() -> None:
    program = """
import sys
sys.modules["triton"] = None  # an import of it raises
from chatsvc.models.attention.select import make_backend
print(make_backend("torch", "cpu").name, make_backend("auto", "cpu").name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() in (["torch", "cpu"], ["torch", "cpu-tiles"], ["torch", "torch"])


@pytest.mark.parametrize(
    ("tiles", "bf16_simd", "kept", "dim", "want"),
    [
        (False, "avx512-bf16", torch.bfloat16, 64, "cpu-int8-bf16"),
        (False, "avx512-bf16", torch.bfloat16, 80, "cpu-int8"),
        (False, "avx512-bf16", torch.float16, 64, "cpu-int8"),
        (False, "avx512-bf16", torch.float32, 64, "cpu-int8"),
        (False, "", torch.bfloat16, 64, "cpu-int8"),
        (True, "amx-bf16", torch.bfloat16, 64, "cpu-int8-tiles"),
    ],
)
def test_the_arithmetic_says_what_multiplies(
    tiles: bool, bf16_simd: str, kept: torch.dtype, dim: int, want: str
) -> None:
    """It is a part of a disk cache's name: keys and values of another arithmetic are others."""
    backend = CpuBackend(cast(Library, SimpleNamespace(tiles=tiles, bf16_simd=bf16_simd)), 1, int8=True)
    assert backend.arithmetic(KVCache(torch.zeros(2, 1, 2, 16, 1, dim, dtype=kept))) == want
