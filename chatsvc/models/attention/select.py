"""Choose an attention backend by name; the one place that knows whether triton and the compiled kernels are there."""

from __future__ import annotations

import importlib.util
import logging
import os

import torch

from chatsvc.errors import ConfigError
from chatsvc.models.attention.base import AttentionBackend
from chatsvc.models.attention.cpu_backend import CpuBackend
from chatsvc.models.attention.torch_backend import TorchBackend
from kernels.cpu.build import BuildError, ensure
from kernels.cpu.library import Library

log = logging.getLogger(__name__)

BACKENDS = ("auto", "torch", "cpu", "triton")


def make_backend(
    name: str,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    int8: bool = False,
) -> AttentionBackend:
    """The backend called ``name`` (one of :data:`BACKENDS`) for tensors on ``device``.

    ``auto`` is the compiled kernels for float32 on a CPU when this machine has a compiler or they are built already,
    else torch: on a GPU too, because the Triton kernels are proved in the interpreter and by compilers only.
    ``cpu`` and ``auto`` compile the CPU kernels when that has not been done on this machine.

    Args:
        dtype: of the model.
        threads: of the compiled CPU kernels; None: as many as this process may use.
        int8: linear layers in whole numbers, which the compiled CPU kernels do and nobody else.

    Raises:
        ConfigError: unknown name, or this machine cannot run it; the message says what would help.
    """
    device = torch.device(device)
    if int8:
        return _int8_backend(name, device, dtype, threads)
    if name == "auto":
        if device.type == "cpu" and dtype == torch.float32:
            return _best_on_cpu(threads)
        if device.type == "cuda" and _triton_installed():
            log.info("attention in plain torch; --attention-backend triton would use kernels that no GPU has run yet")
        name = "torch"
    if name == "torch":
        return TorchBackend()
    if name == "cpu":
        return _cpu_backend(device, threads)
    if name == "triton":
        return _triton_backend(device)
    raise ConfigError(f"--attention-backend {name}: unknown; choose one of {', '.join(BACKENDS)}")


def _cpu_backend(device: torch.device, threads: int | None) -> AttentionBackend:
    if device.type != "cpu":
        raise ConfigError(f"--attention-backend cpu: the model is on {device.type}; use torch or triton (or auto)")
    try:
        return CpuBackend(Library(ensure()), threads)
    except (BuildError, OSError) as e:
        raise ConfigError(f"--attention-backend cpu: {e}; use torch (or auto)") from e


def _int8_backend(name: str, device: torch.device, dtype: torch.dtype, threads: int | None) -> AttentionBackend:
    if name not in ("auto", "cpu"):
        raise ConfigError(
            f"--quantization int8 is done by the compiled CPU kernels: it cannot go with --attention-backend {name}"
        )
    if device.type != "cpu" or dtype != torch.float32:
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization int8 is for float32 on a CPU; the model would be {kind} on {device.type}")
    try:
        return CpuBackend(Library(ensure()), threads, int8=True)
    except (BuildError, OSError) as e:
        raise ConfigError(f"--quantization int8 needs the compiled CPU kernels: {e}") from e


def _best_on_cpu(threads: int | None) -> AttentionBackend:
    try:
        return CpuBackend(Library(ensure()), threads)
    except (BuildError, OSError) as e:
        log.warning("compiled CPU kernels are not available, plain torch is used, which is slower: %s", e)
        return TorchBackend()


def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _triton_backend(device: torch.device) -> AttentionBackend:
    if not _triton_installed():
        raise ConfigError(
            "--attention-backend triton: the triton package is not installed; install chatsvc[triton], or use torch"
        )
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            f"--attention-backend triton: the model is on {device.type} and Triton compiles for GPUs; use torch, or "
            "set TRITON_INTERPRET=1 before the start to run the kernels in Triton's (very slow) interpreter"
        )
    from chatsvc.models.attention.triton_backend import TritonBackend  # noqa: PLC0415  triton is optional

    return TritonBackend()
