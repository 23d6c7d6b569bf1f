"""``chatsvc serve`` in processes of their own, with an executor that computes no model."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

MAIN = "from chatsvc.cli.main import main; main()"


class Process:
    """A server on a free port. ``before``: Python that runs first in its process."""

    def __init__(self, folder: Path, name: str, *flags: str, before: str = "") -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHATSVC_")}
        command = [sys.executable, "-c", before + MAIN, "serve", "--executor", "simulated", "--port", "0", *flags]
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out)
        self.url = ""

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self) -> Process:
        """Until it is ready."""
        end = time.monotonic() + 90
        while not (found := re.search(r"Chat page:\s+(http://\S+)/", self.text)):
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.02)
        self.url = found[1]
        return self

    def client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, limits=limits)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@dataclass
class Told:
    """What one reader of a turn has been told so far."""

    text: str = ""
    ids: list[str] = field(default_factory=list)
    done: bool = False
    error: dict[str, Any] | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)


async def take(response: httpx.Response, told: Told) -> None:
    async for line in response.aiter_lines():
        if line.startswith("id: "):
            told.ids.append(line[4:])
        elif line == "data: [DONE]":
            told.done = True
        elif line.startswith("data: "):
            chunk = json.loads(line[6:])
            told.error = chunk.get("error", told.error)
            for choice in chunk.get("choices", ()):
                told.text += choice["delta"].get("content", "")
                told.started.set()


async def turn(http: httpx.AsyncClient, sid: str, told: Told, **fields: Any) -> None:
    """A turn, read to its end or to the end of the connection."""
    body = {"content": "hi", "ignore_eos": True, **fields}
    try:
        async with http.stream("POST", f"/v1/sessions/{sid}/messages", json=body) as response:
            assert response.status_code == 200, await response.aread()
            await take(response, told)
    except httpx.TransportError:
        pass  # the server was killed


async def sessions(http: httpx.AsyncClient, count: int) -> list[str]:
    return [(await http.post("/v1/sessions", json={})).raise_for_status().json()["id"] for _ in range(count)]


async def answer(http: httpx.AsyncClient, sid: str) -> dict[str, Any]:
    got = await http.get(f"/v1/sessions/{sid}")
    assert got.status_code == 200, got.text
    return dict(got.json()["messages"][-1])


async def metric(http: httpx.AsyncClient, name: str) -> float:
    found = re.search(rf"^chatsvc_{name} (\S+)$", (await http.get("/metrics")).text, re.M)
    assert found is not None, name
    return float(found[1])
