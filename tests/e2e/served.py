"""A real server in a process of its own, as `make serve` starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx


class Served:
    """``chatsvc serve`` on a free port with the default model; log in ``log``."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        self.log = folder / "serve.log"
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHATSVC_")}
        env |= {"CHATSVC_PORT": "0", "CHATSVC_SESSION_STORE": f"sqlite:///{folder}/sessions.db"}
        env |= {"CHATSVC_KV_CACHE_MEMORY": "512MiB"}
        env |= {"CHATSVC_" + k.upper(): str(v) for k, v in flags.items()}
        self.out = self.log.open("wb")
        command = [str(Path(sys.executable).parent / "chatsvc"), "serve"]
        self.process = subprocess.Popen(command, env=env, cwd=folder, stdout=self.out, stderr=self.out)
        self.url = ""

    def wait(self, seconds: float = 120) -> Served:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            found = re.search(r"Chat page:\s+(\S+)/\n", self.text)
            if found:
                self.url = found[1]
                return self
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.text}")

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def metrics(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics", timeout=30).raise_for_status().text
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name.removeprefix("chatsvc_"): float(value) for name, value in rows}

    def idle(self, seconds: float = 60) -> dict[str, float]:
        """Wait until nothing runs, and hand over the metrics."""
        end = time.monotonic() + seconds
        while True:
            m = self.metrics()
            busy = m["requests_running"] + m["requests_waiting"] + m['kv_blocks{state="used"}']
            if not busy or time.monotonic() > end:
                assert not busy, m
                return m
            time.sleep(0.1)

    def stop(self, seconds: float = 60) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.out.close()
        return self.process.wait()
