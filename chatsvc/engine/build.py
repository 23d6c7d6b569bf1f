"""From a configuration to an engine that can be started. The one place that knows every part by name."""

from __future__ import annotations

import logging
import os
import secrets
from functools import partial

import torch

from chatsvc.config import ServeConfig, usable_cpus, usable_memory
from chatsvc.engine.async_engine import AsyncEngine, EngineConfig
from chatsvc.engine.persistence import DiskCache
from chatsvc.engine.protocol import Built, text_side
from chatsvc.errors import ConfigError
from chatsvc.modelfiles import ModelFiles, fingerprint
from chatsvc.models.attention.base import AttentionBackend, FusedModel, FusingBackend
from chatsvc.models.attention.select import make_backend
from chatsvc.models.base import CausalLM
from chatsvc.models.loader import load_config, open_model
from chatsvc.runtime import kv
from chatsvc.runtime.clock import ClockExecutor, clock_tokens
from chatsvc.runtime.executor import Executor
from chatsvc.runtime.local import LocalConfig, LocalExecutor, plan_capacity
from chatsvc.runtime.simulated import SimulatedConfig, SimulatedExecutor, hashed_token
from chatsvc.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SIMULATED_BLOCKS = 4096
SIMULATED_CONTEXT = 8192


def device_of() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def dtype_of(config: ServeConfig, device: torch.device) -> torch.dtype:
    """``auto``: float32 on a CPU (exact, and no slower there), bfloat16 on a GPU."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, config.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def kv_dtype_of(config: ServeConfig, dtype: torch.dtype) -> torch.dtype:
    """What the KV pool keeps; ``auto``: the model's ``dtype``, or bfloat16 where int8 is not exact anyway.

    Raises: ConfigError for kernels that cannot read the one beside the other.
    """
    if config.kv_cache_dtype == "auto":
        return torch.bfloat16 if config.quantization == "int8" else dtype
    kept = getattr(torch, config.kv_cache_dtype)
    assert isinstance(kept, torch.dtype)
    if kept != dtype and config.attention_backend == "triton":
        kind = str(dtype).removeprefix("torch.")
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} beside --dtype {kind} is done by the attention backends cpu and "
            "torch, not by triton"
        )
    return kept


def build(config: ServeConfig) -> Built[AsyncEngine]:
    """Everything that can be found wrong without reading weights is found here.

    Raises: ConfigError, ModelError.
    """
    text = text_side(config)
    files, tokenizer = text.files, text.tokenizer
    if text.template is None:
        log.warning("%s has no chat template: chat requests will be refused; give one with --chat-template", files.name)
    executor = _simulated(config, tokenizer) if config.executor == "simulated" else _local(config, files)
    if config.preemption == "swap" and not config.host_kv_memory:
        log.warning("--preemption swap needs --host-kv-memory: preempted sequences are recomputed")
    secret = config.cache_secret.encode() if config.cache_secret else secrets.token_bytes(32)
    engine_config = EngineConfig(
        block_size=config.block_size,
        prefix_caching=config.prefix_caching,
        cache_secret=secret,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_step_seconds=config.max_step_ms / 1000,
        max_queue=config.max_queue,
        queue_timeout=config.queue_timeout,
        preemption=config.preemption,
        steps_in_flight=config.steps_in_flight,
        disk_cache=_disk_cache(config, files),
        policy=config.policy,
        prefill_share=config.prefill_share,
        keep_shared=config.keep_shared_prefixes,
    )
    return Built(AsyncEngine(engine_config, executor, tokenizer), tokenizer, text.template, files)


def _disk_cache(config: ServeConfig, files: ModelFiles) -> DiskCache | None:
    if config.disk_cache_dir is None:
        return None
    disk = DiskCache(config.disk_cache_dir, int(config.disk_cache_size), partial(fingerprint, files))
    disk.prepare()
    return disk


def _local(config: ServeConfig, files: ModelFiles) -> Executor:
    device = device_of()
    dtype = dtype_of(config, device)
    threads = config.threads or int(os.environ.get("OMP_NUM_THREADS", 0)) or usable_cpus()
    int8 = config.quantization == "int8"
    backend = make_backend(config.attention_backend, device, dtype=dtype, threads=threads, int8=int8)
    local = LocalConfig(
        block_size=config.block_size,
        kv_cache_memory=config.kv_bytes,
        kv_dtype=kv_dtype_of(config, dtype),
        num_blocks=config.num_kv_blocks,
        host_kv_memory=int(config.host_kv_memory),
        max_model_len=config.max_model_len,
        max_step_seconds=config.max_step_ms / 1000,
        measure=config.max_num_batched_tokens is None,
    )
    shape = load_config(files).shape
    blocks, _ = plan_capacity(local, shape, dtype, quiet=True)  # refuse what cannot fit before anything is loaded
    pool = blocks * kv.block_bytes(shape, config.block_size, local.kv_dtype or dtype)
    if device.type == "cpu" and pool > usable_memory():
        flag = "--num-kv-blocks" if config.num_kv_blocks is not None else "--kv-cache-memory"
        raise ConfigError(
            f"the KV pool would take {pool / 2**30:.1f} GiB, but {usable_memory() / 2**30:.1f} GiB of memory are "
            f"usable: lower {flag}"
        )

    def load() -> tuple[CausalLM | FusedModel, AttentionBackend]:
        torch.set_num_threads(1)  # for the compiled step, which has threads of its own; torch's would be in their way
        opened = open_model(files)
        fused = backend.load(opened, dtype) if isinstance(backend, FusingBackend) else None
        if fused is not None:
            return fused, backend
        torch.set_num_threads(threads)
        return opened.read(dtype, device), backend

    return LocalExecutor(local, load)


def _simulated(config: ServeConfig, tokenizer: Tokenizer) -> Executor:
    blocks = config.num_kv_blocks or SIMULATED_BLOCKS
    room = blocks * config.block_size
    if config.max_model_len is not None and config.max_model_len > room:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {-(-config.max_model_len // config.block_size)} blocks for "
            f"one sequence, the KV pool has {blocks} ({room} tokens): raise --num-kv-blocks or lower --max-model-len"
        )
    if config.kv_cache_memory is not None:
        log.warning("--executor simulated has no KV memory: --num-kv-blocks sets its pool, which has %d blocks", blocks)
    first = 1 + max((i for i in range(min(1024, tokenizer.vocab_size)) if tokenizer.is_special(i)), default=-1)
    simulated = SimulatedConfig(
        num_blocks=blocks,
        block_size=config.block_size,
        vocab_size=tokenizer.vocab_size,
        max_model_len=min(config.max_model_len or SIMULATED_CONTEXT, room),
        step_seconds=config.simulated_step_ms / 1000,
        token_seconds=config.simulated_token_ms / 1000,
        first_token_id=first,
        tokens_per_step=max(
            16, int((config.max_step_ms - config.simulated_step_ms) / max(config.simulated_token_ms, 0.01))
        ),
    )
    if config.simulated_text == "clock":
        try:
            ids = clock_tokens(tokenizer.vocab_size, tokenizer.token_bytes, tokenizer.is_special)
        except ValueError as e:
            raise ConfigError(f"--simulated-text clock: {e}") from e
        return ClockExecutor(simulated, ids)
    return SimulatedExecutor(simulated, hashed_token(first, tokenizer.vocab_size))
