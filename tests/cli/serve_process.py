"""``chatsvc serve`` in a process of its own, without a model, and what a test asks it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

MAIN = "from chatsvc.cli.main import main; main()"


class Serve:
    def __init__(self, folder: Path, before: str = "", *flags: str) -> None:
        env = {k: v for k, v in os.environ.items() if not k.startswith("CHATSVC_")}
        command = [sys.executable, "-c", before + MAIN, "serve", "--executor", "simulated", "--port", "0", *flags]
        self.out = folder / "out"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(command, env=env, cwd=folder, stdout=out, stderr=out)

    @property
    def text(self) -> str:
        return self.out.read_text()

    def children(self) -> list[int]:
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in listed.split()]

    def until(self, pattern: str) -> re.Match[str]:
        end = time.monotonic() + 60
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < end and self.process.poll() is None, self.text
            time.sleep(0.02)
        return found

    def connect(self) -> socket.socket:
        port = int(self.until(r"Chat page:\s+http://127\.0\.0\.1:(\d+)/")[1])
        return socket.create_connection(("127.0.0.1", port), timeout=30)

    def ends(self, *signals: int) -> int:
        for i, sig in enumerate(signals):
            if i:  # two at once would be one
                self.until("draining")
            self.process.send_signal(sig)
        status = self.process.wait(30)
        assert "Traceback" not in self.text and "Error" not in self.text, self.text
        return status


def ask(sock: socket.socket, path: str, body: object) -> None:
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
