"""The container stack as Compose reads it, and that its checks find what they are for."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check = load("check_compose")
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return dict(check.read(ROOT, check.FILES))


def test_the_stack_has_nothing_wrong(config: dict[str, Any]) -> None:
    assert check.problems(config, DOCKERFILE, check.known_settings()) == []
    assert set(config["services"]) == {"chatsvc", "redis"}
    assert check.main() == 0


def test_the_override_for_loopback_is_valid() -> None:
    both = check.read(ROOT, check.WITH_CHECK)
    assert all(s["network_mode"] == "host" and not s.get("ports") for s in both["services"].values())


def test_a_file_that_compose_refuses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "compose.yaml").write_text("services:\n  a:\n    imag: x\n")
    with pytest.raises(subprocess.CalledProcessError) as refused:
        check.read(tmp_path, ("compose.yaml",))
    assert "imag" in refused.value.stderr


def _change(path: str, value: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        *keys, last = path.split(".")
        at = config["services"]
        for key in keys:
            at = at[key]
        at[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_change("chatsvc.healthcheck.test", ["CMD-SHELL", "curl -f http://localhost:8000/ready"]), "calls curl"),
        (_change("redis.healthcheck.test", ["CMD", "nc", "-z", "localhost", "6379"]), "calls nc"),
        (_change("chatsvc.healthcheck.test", ["CMD", "python", "-c", "pass"]), "does not ask for readiness"),
        (_change("chatsvc.healthcheck.start_period", "20s"), "start period"),
        (_change("redis.healthcheck", None), "has no health check"),
        (_change("chatsvc.depends_on.redis.condition", "service_started"), "does not wait"),
        (_change("chatsvc.ports", [{"target": 8000, "published": "8000"}]), "open to the network"),
        (_change("chatsvc.user", "root"), "runs as root"),
        (_change("redis.privileged", True), "privileged"),
        (_change("redis.restart", "no"), "not started again"),
        (_change("redis.image", "redis"), "has no version"),
        (_change("chatsvc.environment.CHATSVC_NO_SUCH", "1"), "is no setting"),
        (_change("chatsvc.environment.REDIS_PASSWORD", "hunter2"), "pass secrets from outside"),
    ],
)
def test_what_is_wrong_is_found(config: dict[str, Any], change: Any, says: str) -> None:
    """DC-01, DC-02."""
    broken = copy.deepcopy(config)
    change(broken)
    assert any(says in text for text in check.problems(broken, DOCKERFILE, check.known_settings()))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("USER 10001\n", "", "runs as root"),
        ("USER 10001\n", "USER root\n", "runs as root"),
        ('CMD ["/opt/chatsvc/bin/python", "/opt', 'CMD ["curl", "/opt', "calls curl"),
        ("COPY docker/healthcheck.py /opt/chatsvc/healthcheck.py\n", "", "nothing puts there"),
        ("--start-period=180s", "--start-period=5s", "start period"),
        ("HEALTHCHECK", "# HEALTHCHECK", "no health check"),
        ("FROM python:3.11-slim AS", "FROM python AS", "no version"),
    ],
)
def test_what_is_wrong_in_the_dockerfile_is_found(config: dict[str, Any], old: str, new: str, says: str) -> None:
    assert old in DOCKERFILE
    found = check.problems(config, DOCKERFILE.replace(old, new), check.known_settings())
    assert any(text.startswith("Dockerfile") and says in text for text in found)


def test_the_image_gets_only_what_it_needs() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    copied = {w for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
              for w in line.split()[1:-1]}  # fmt: skip
    assert copied == {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1), (None, 1)])
async def test_the_health_check_tells_ready_from_not(status: int | None, code: int, tmp_path: Path) -> None:
    import asyncio
    import os

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /ready ")
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if status is None:
        server.close()
        await server.wait_closed()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(ROOT / "docker" / "healthcheck.py"), env={**os.environ, "CHATSVC_PORT": str(port)},
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    assert await asyncio.wait_for(process.wait(), 30) == code
    server.close()
