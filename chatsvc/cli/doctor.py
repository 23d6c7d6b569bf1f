"""``chatsvc doctor``: what will be used on this machine, and what is wrong."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import torch

from chatsvc import __version__
from chatsvc.api.keys import read_keys
from chatsvc.cli.options import GroupedCommand, given, options_of
from chatsvc.cli.remarks import is_loopback
from chatsvc.config import ServeConfig, usable_cpus, usable_memory
from chatsvc.engine.build import device_of, dtype_of
from chatsvc.errors import ChatsvcError, StoreError
from chatsvc.modelfiles import resolve
from chatsvc.models.attention.cpu_backend import CpuBackend
from chatsvc.models.attention.select import make_backend
from chatsvc.models.config import ModelConfig
from chatsvc.models.loader import load_config
from chatsvc.sessions.select import open_store
from chatsvc.sessions.sqlite import check_folder
from chatsvc.text.template import load_template
from chatsvc.text.tokenizer import load_tokenizer
from kernels.cpu.build import built, compiler, works

_MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


@dataclass(frozen=True, slots=True)
class Finding:
    """Attributes:
    level: ok, warn (works, with a drawback), fail (``serve`` would not start or not answer).
    """

    topic: str
    level: Literal["ok", "warn", "fail"]
    text: str


@click.command("doctor", cls=GroupedCommand, context_settings={"max_content_width": 120})
@options_of(ServeConfig)
def command(**values: Any) -> None:
    """Say what hardware, kernels, model and store `serve` would use with the same flags, and what is wrong."""
    findings = collect(ServeConfig.of(**given(values)))
    click.echo(render(findings))
    sys.exit(1 if any(finding.level == "fail" for finding in findings) else 0)


def collect(config: ServeConfig) -> list[Finding]:
    """Look at everything; never raises for what it finds, and changes nothing."""
    checks: Iterable[Callable[[ServeConfig], list[Finding]]] = (
        _software,
        _hardware,
        _kernels,
        _model,
        _memory,
        _store,
        _address,
        _keys,
    )
    return [finding for check in checks for finding in _safely(check, config)]


def render(findings: list[Finding]) -> str:
    """A table, and one sentence at its end."""
    width = max((len(finding.topic) for finding in findings), default=0)
    lines = [f"{_MARKS[f.level]}  {f.topic:<{width}}  {f.text}" for f in findings]
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    end = f"{failed} thing(s) missing or wrong: chatsvc serve will not work like this." if failed else "Ready to serve."
    return "\n".join([*lines, "", end + (f" {warned} warning(s)." if warned else "")])


def _safely(check: Callable[[ServeConfig], list[Finding]], config: ServeConfig) -> list[Finding]:
    topic = check.__name__.strip("_")
    try:
        return check(config)
    except ChatsvcError as error:
        return [Finding(topic, "fail", str(error))]
    except Exception as error:  # a doctor that falls ill helps nobody
        return [Finding(topic, "fail", f"{type(error).__name__}: {error}")]


def _software(_: ServeConfig) -> list[Finding]:
    text = (
        f"chatsvc {__version__}, Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    )
    return [Finding("software", "ok", text)]


def _hardware(_: ServeConfig) -> list[Finding]:
    found = [
        Finding("processor", "ok", f"{usable_cpus()} usable of {os.cpu_count()} cores, {platform.machine()}"),
        Finding("memory", "ok", f"{_size(usable_memory())} usable (control groups counted)"),
    ]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return [*found, Finding("gpu", "ok", ", ".join(names))]
    why = "none visible" if torch.version.cuda else "not used: this torch is built for the CPU"
    return [*found, Finding("gpu", "ok", why)]


def _kernels(config: ServeConfig) -> list[Finding]:
    device = device_of()
    dtype = dtype_of(config, device)
    triton = importlib.util.find_spec("triton") is not None
    found = compiler()
    cxx = found if found and works(found) else None
    wanted = config.attention_backend == "cpu" or (config.attention_backend == "auto" and dtype == torch.float32)
    int8 = config.quantization == "int8"
    if device.type == "cpu" and wanted and cxx and not built():
        attention = Finding("attention", "ok", "compiled CPU kernels; the first start compiles them (about 20 s)")
    elif device.type == "cpu" and wanted and not cxx and config.attention_backend == "auto" and not int8:
        text = "plain torch on cpu, which is slower: a C++ compiler (g++ or clang++) would give compiled kernels"
        attention = Finding("attention", "warn", text)
    else:
        backend = make_backend(config.attention_backend, device, dtype=dtype, int8=int8)
        how = f", {backend.products}" if isinstance(backend, CpuBackend) else ""
        attention = Finding("attention", "ok", f"{type(backend).__name__} on {device}{how}")
    return [
        attention,
        Finding(
            "triton",
            "warn" if device.type == "cuda" and not triton else "ok",
            "installed" if triton else "not installed (only needed on a GPU)",
        ),
        Finding("compiler", "ok", cxx or "none found")
        if cxx == found
        else Finding("compiler", "warn", f"{found} compiles no C++20"),
    ]


def _model(config: ServeConfig) -> list[Finding]:
    files = resolve(config.model)
    found = [Finding("model", "ok", f"{files.name}: {files.path} ({files.format}, {_size(_bytes(files.path))})")]
    found.append(Finding("shape", "ok", _shape(load_config(files))))
    tokenizer = load_tokenizer(files)
    found.append(
        Finding("tokenizer", "ok", f"{tokenizer.vocab_size} tokens, ends with {sorted(tokenizer.eos_token_ids)}")
    )
    if not tokenizer.eos_token_ids:
        found[-1] = Finding("tokenizer", "warn", "no end token is known: answers end at their length only")
    template = load_template(files, tokenizer, config.chat_template)
    missing = Finding(
        "template", "warn", "the model brings no chat template: chats are refused; give --chat-template FILE"
    )
    return [*found, Finding("template", "ok", "there") if template is not None else missing]


def _shape(config: ModelConfig) -> str:
    heads = f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}"
    return f"{config.architecture}, {config.num_layers} layers, {heads}, context {config.max_position_embeddings}"


def _memory(config: ServeConfig) -> list[Finding]:
    usable, wanted = usable_memory(), config.kv_bytes
    text = f"{_size(wanted)} for KV blocks of {config.block_size} tokens"
    if config.num_kv_blocks is not None:
        text = f"{config.num_kv_blocks} KV blocks of {config.block_size} tokens"
    elif wanted >= usable:
        return [Finding("kv cache", "fail", f"{text}, but only {_size(usable)} are usable: lower --kv-cache-memory")]
    return [Finding("kv cache", "ok", text)]


def _store(config: ServeConfig) -> list[Finding]:
    url = config.session_store
    store = open_store(url, config.session_ttl)
    scheme, _, rest = url.partition("://")
    if scheme == "memory":
        return [Finding("sessions", "warn", "in memory: they are lost when the server stops")]
    if scheme == "sqlite":
        path = Path(rest.removeprefix("/")).expanduser().absolute()
        check_folder(path)
        place = path if path.exists() else path.parent
        if not os.access(place, os.W_OK):
            return [Finding("sessions", "fail", f"{place} cannot be written: choose another --session-store")]
        return [Finding("sessions", "ok", f"SQLite file {path}")]

    async def ask() -> None:
        try:
            await store.open()  # raises what serve would not start with
            await store.ping()
        finally:
            await store.close()

    try:
        asyncio.run(ask())
    except StoreError as error:  # serve starts all the same: the store may come later
        why = str(error.__cause__ or error).strip().removesuffix(".")
        text = f"{scheme} cannot answer ({why}): serve starts and chats work, but sessions are 503 until it can"
        return [Finding("sessions", "warn", text)]
    return [Finding("sessions", "ok", f"{scheme} answers")]


def _address(config: ServeConfig) -> list[Finding]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except OSError as error:
            text = f"{config.host}:{config.port}: {error.strerror}: choose another --host or --port"
            if error.errno == errno.EADDRINUSE:
                text += ", or end the server that is running there"
            return [Finding("address", "fail", text)]
    return [Finding("address", "ok", f"{config.host}:{config.port} is free")]


def _keys(config: ServeConfig) -> list[Finding]:
    path = config.api_key_file
    if path is None:
        open_ = not is_loopback(config.host)
        who = "everybody who reaches the address" if open_ else "who works on this machine"
        return [Finding("keys", "warn" if open_ else "ok", f"none: {who} may use the server and read its sessions")]
    count = len(read_keys(path).keys)
    if path.stat().st_mode & 0o022:
        return [Finding("keys", "warn", f"{count} in {path}, which others than its owner may change")]
    return [Finding("keys", "ok", f"{count} in {path}")]


def _bytes(path: Path) -> int:
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
