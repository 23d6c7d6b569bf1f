"""Every setting of the server, once: type, default, help text, group. Frozen; passed in, never looked up.

The command line is made from this model: field ``max_num_seqs`` is the flag ``--max-num-seqs`` and the environment
variable ``CHATSVC_MAX_NUM_SEQS``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from chatsvc.errors import ConfigError

BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_DEFAULT_KV = 4 * 2**30
_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """``90``, ``90s``, ``1.5m``, ``30d`` -> seconds."""
    if isinstance(value, str):
        found = re.fullmatch(r"\s*([0-9.]+)\s*(ms|s|m|h|d|)\s*", value)
        if found is None:
            raise ValueError("a time is a number with an optional unit: ms, s, m, h or d")
        return float(found[1]) * _UNITS[found[2]]
    return value


def _bytes(value: Any, parse: ValidatorFunctionWrapHandler) -> Any:
    """``1000000``, ``512MiB``, ``1.5 GB`` -> bytes. All of the text counts: pydantic alone reads ``1,5GiB`` as 1."""
    try:
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]*\.?[0-9]+\s*[A-Za-z]*\s*", value) is None:
            raise ValueError
        return parse(value)
    except ValueError:  # pydantic's own error is one, too
        raise ValueError("a size is a number of bytes with an optional unit: KiB, MiB, GiB ..., e.g. 512MiB") from None


def _origins(value: Any) -> Any:
    """``https://a.example,http://localhost:3000`` -> a tuple."""
    if not isinstance(value, str):
        return value or ()
    found = tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
    for origin in found:
        if origin != "*" and re.fullmatch(r"https?://[a-z0-9.\-\[\]:]+", origin) is None:
            raise ValueError("an origin is scheme://host[:port] in small letters, such as https://chat.example")
    return found


Origins = Annotated[tuple[str, ...], BeforeValidator(_origins)]
Bytes = Annotated[ByteSize, WrapValidator(_bytes)]
Seconds = Annotated[float, BeforeValidator(_seconds), Field(ge=0)]


def _field(default: Any, group: str, help_text: str, **limits: Any) -> Any:
    return Field(default, description=help_text, json_schema_extra={"group": group}, **limits)


class ServeConfig(BaseModel):
    """Flags of ``chatsvc serve``; see the public contract for their meaning."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    model: str = _field(
        "smollm2-135m", "Model", "default model, a directory with safetensors, a .gguf file, or a Hub id"
    )
    served_model_name: str | None = _field(None, "Model", "public name [last part of --model]", min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _field(
        "auto", "Model", "weights and KV (auto: float32 on CPU)"
    )
    quantization: Literal["auto", "none", "int8"] = _field(
        "auto", "Model", "int8: faster linear layers on a CPU, no longer exact; auto: none"
    )
    max_model_len: int | None = _field(None, "Model", "longest sequence [the model's, or what the pool holds]", ge=2)
    seed: int | None = _field(None, "Model", "base of the seeds of requests that bring none [random]", ge=0, lt=2**63)
    chat_template: Path | None = _field(None, "Model", "file with a Jinja chat template [the model's own]")
    threads: int | None = _field(None, "Model", "CPU threads of the forward pass [usable cores]", ge=1, le=1024)

    block_size: int = _field(16, "Memory", "tokens of a KV block: 8, 16, 32, 64 or 128")
    kv_cache_memory: Bytes | None = _field(
        None, "Memory", "bytes of the KV pool, e.g. 512MiB [a quarter of the usable memory, at most 4 GiB]"
    )
    num_kv_blocks: int | None = _field(None, "Memory", "usable KV blocks; overrides --kv-cache-memory", ge=1)
    host_kv_memory: Bytes = _field(ByteSize(0), "Memory", "swap space and host tier, e.g. 1GiB")
    disk_cache_dir: Path | None = _field(
        None,
        "Memory",
        "directory in which hot prefixes survive a restart (written about once a minute and at the end) [none]",
    )
    disk_cache_size: Bytes = _field(ByteSize(2**30), "Memory", "most bytes in it for a model")
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16"] = _field(
        "auto", "Memory", "auto: as --dtype, bfloat16 with int8; 16 bits take half the memory, and are not exact"
    )
    prefix_caching: bool = _field(True, "Memory", "share KV blocks between equal prefixes")
    keep_shared_prefixes: Seconds = _field(
        0.0, "Memory", "prefixes shared by many requests stay that long after their last use, e.g. 1h; 0: as all others"
    )
    cache_secret: str | None = _field(None, "Memory", "secret of the prefix hashes [random per process]", min_length=1)

    max_num_seqs: int = _field(64, "Scheduling", "sequences that run at a time", ge=1)
    max_num_batched_tokens: int | None = _field(
        None, "Scheduling", "tokens of a step [measured, see --max-step-ms]", ge=1
    )
    max_step_ms: float = _field(250.0, "Scheduling", "a step with running streams stays under it", gt=0)
    policy: Literal["fcfs", "priority", "fair", "shortest"] = _field(
        "fcfs", "Scheduling", "who goes first; priority and shortest age, fair shares among tenants"
    )
    prefill_share: float = _field(
        1.0, "Scheduling", "share of a step that prompts may take while answers stream: TTFT against TPOT", gt=0, le=1
    )
    preemption: Literal["auto", "swap", "recompute"] = _field(
        "auto", "Scheduling", "how a sequence steps back when the pool is dry; auto: the cheaper"
    )
    max_n: int = _field(16, "Scheduling", "most choices of one request", ge=1, le=128)
    max_queue: int = _field(256, "Scheduling", "requests that may wait; one more gets 429", ge=1)
    queue_timeout: Seconds = _field(60.0, "Scheduling", "longest wait for the first step")

    engine: Literal["thread", "process"] = _field(
        "thread", "Engine", "the engine in a thread, or in a process of its own"
    )
    executor: Literal["local", "simulated"] = _field("local", "Engine", "simulated: no weights, a given step time")
    simulated_step_ms: float = _field(20.0, "Engine", "simulated: fixed part of a step", ge=0)
    simulated_token_ms: float = _field(0.1, "Engine", "simulated: added per token", ge=0)
    steps_in_flight: int = _field(2, "Engine", "2: plan the next step while one runs; 1: when it is over", ge=1, le=2)
    simulated_text: Literal["hash", "clock"] = _field(
        "hash", "Engine", "simulated: a function of the text so far, or the time at which it was made"
    )
    attention_backend: Literal["auto", "torch", "cpu", "triton"] = _field("auto", "Engine", "attention kernels")
    speculative: Literal["none", "ngram", "draft"] = _field("none", "Engine", "only none in this version")
    draft_model: str | None = _field(None, "Engine", "draft model (not in this version)")
    num_speculative_tokens: int = _field(4, "Engine", "drafts a step", ge=1)
    tensor_parallel_size: int = _field(1, "Engine", "only 1 in this version", ge=1)

    host: str = _field("127.0.0.1", "Service", "address to listen on")
    port: int = _field(8000, "Service", "port to listen on; 0 takes a free one", ge=0, le=65535)
    session_store: str = _field("sqlite:///chatsvc.db", "Service", "sqlite:///FILE, redis://HOST:PORT/DB or memory://")
    session_ttl: Seconds = _field(30 * 86400.0, "Service", "idle sessions are forgotten after it, e.g. 30d")
    resume_grace: Seconds = _field(60.0, "Service", "a session's answer goes on that long without a reader")
    api_key_file: Path | None = _field(None, "Service", "only these API keys may in; see `chatsvc key new` [no keys]")
    cors_origins: Origins = _field(None, "Service", "web origins whose pages may call, with commas; * is all [none]")
    request_timeout: Seconds = _field(0.0, "Service", "most time for a whole answer, e.g. 5m; 0: no limit")
    drain_timeout: Seconds = _field(30.0, "Service", "running streams may finish that long after SIGTERM")
    ping_interval: Seconds = _field(15.0, "Service", "comment on a silent stream after that time; 0: none")

    @model_validator(mode="after")
    def _known_limits(self) -> ServeConfig:
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"--block-size {self.block_size}: choose one of {', '.join(map(str, BLOCK_SIZES))}")
        later = {
            f"--speculative {self.speculative}": self.speculative != "none" or self.draft_model is not None,
            "--tensor-parallel-size": self.tensor_parallel_size != 1,
        }
        for flag, asked in later.items():
            if asked:
                raise ValueError(f"{flag} is not in this version of chatsvc")
        if self.disk_cache_dir is not None and not self.prefix_caching:
            raise ValueError("--disk-cache-dir keeps shared prefixes: it cannot go with --no-prefix-caching")
        return self

    @classmethod
    def of(cls, **values: Any) -> ServeConfig:
        """Build and validate. Raises: ConfigError that names the flag."""
        try:
            return cls(**values)
        except ValidationError as e:
            first = e.errors()[0]
            flag = f"--{'-'.join(str(p) for p in first['loc']).replace('_', '-')}: " if first["loc"] else ""
            raise ConfigError(flag + first["msg"].removeprefix("Value error, ")) from e

    @property
    def kv_bytes(self) -> int:
        return int(self.kv_cache_memory) if self.kv_cache_memory is not None else default_kv_memory(usable_memory())


def usable_cpus() -> int:
    """Cores that this process may use (affinity-aware)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def usable_memory(proc: Path = Path("/proc/self/cgroup"), mounted: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory this process may use: the machine's, or less if its cgroup (v2 or v1) or one above says so."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _memory_limits(proc, mounted):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limit = min(limit, int(text))
    return limit


def _memory_limits(proc: Path, mounted: Path) -> Iterator[Path]:
    """Where the limits would stand, as cgroups(7) has it.

    In a container the path of its cgroup may be the host's, which cannot be seen there; its own limit is at the root.
    """
    v1, v2 = mounted / "memory", mounted
    own = {v1: PurePosixPath("/"), v2: PurePosixPath("/")}
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                own[v2] = PurePosixPath(path)
            elif "memory" in controllers.split(","):
                own[v1] = PurePosixPath(path)
    for root, name in ((v1, "memory.limit_in_bytes"), (v2, "memory.max")):
        for at in (own[root], *own[root].parents):
            if ".." not in at.parts:
                yield root / at.relative_to("/") / name


def default_kv_memory(memory: int) -> int:
    return min(memory // 4, MAX_DEFAULT_KV)
