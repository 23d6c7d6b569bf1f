"""A backend that this machine cannot run is refused at start, with a sentence that helps."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.select import BACKENDS, make_backend


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
            assert backend.name == "torch"


def test_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"flash.*auto, torch, cpu, triton"):
        make_backend("flash", "cpu")


def test_compiled_cpu_kernels_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="not part of this version"):
        make_backend("cpu", "cpu")


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="TRITON_INTERPRET=1"):
        make_backend("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert make_backend("triton", torch.device("cpu")).name == "triton"


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
print(make_backend("auto", "cpu").name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "torch"
