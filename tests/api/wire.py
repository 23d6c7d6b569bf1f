"""A client that trusts nothing: raw sockets, raw bytes, a strict event parser."""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def strict(text: str | bytes) -> Any:
    """JSON without NaN and Infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} in JSON")

    return json.loads(text, parse_constant=refuse)


class Connection:
    """One TCP connection that speaks HTTP/1.1."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.buffer = b""

    def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: x"]
        sent = {"Content-Type": "application/json", "Content-Length": str(len(raw)), **(headers or {})}
        lines += [f"{k}: {v}" for k, v in sent.items() if v]
        self.sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)

    def post(self, path: str, body: Any, **headers: str) -> None:
        self.send("POST", path, body, headers)

    def _until(self, mark: bytes) -> bytes:
        while mark not in self.buffer:
            self._more()
        head, _, self.buffer = self.buffer.partition(mark)
        return head

    def _more(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise EOFError(self.buffer)
        self.buffer += data

    def _exactly(self, n: int) -> bytes:
        while len(self.buffer) < n:
            self._more()
        out, self.buffer = self.buffer[:n], self.buffer[n:]
        return out

    def head(self) -> tuple[int, dict[str, str]]:
        lines = self._until(b"\r\n\r\n").decode().split("\r\n")
        fields = [line.split(": ", 1) for line in lines[1:]]
        return int(lines[0].split()[1]), {k.lower(): v for k, v in fields}

    def piece(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(self._until(b"\r\n"), 16)
        data = self._exactly(size)
        assert self._exactly(2) == b"\r\n"
        return data

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """A whole response; the connection stays open."""
        status, headers = self.head()
        if "content-length" in headers:
            return status, headers, self._exactly(int(headers["content-length"]))
        body = b""
        while piece := self.piece():
            body += piece
        return status, headers, body

    def reset(self) -> None:
        """Close with a TCP reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def events(body: bytes) -> list[Any]:
    """Events of a whole stream: JSON values, ``"[DONE]"``, comments left out. Anything unexpected fails.

    LF only, one ``data`` line per event, at most one ``event`` line before it.
    """
    assert b"\r" not in body
    text = body.decode("utf-8")
    assert text.endswith("\n\n")
    out: list[Any] = []
    for block in text[:-2].split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        data = lines[-1]
        assert data.startswith("data: ") and data.splitlines() == [data], data
        assert lines[:-1] in ([], ["event: error"]), lines
        value = data.removeprefix("data: ")
        out.append(value if value == "[DONE]" else strict(value))
    return out


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """A usage object without what differs each time."""
    return {name: value for name, value in usage.items() if name != "timings"}


def stream(port: int, body: dict[str, Any], path: str = "/v1/chat/completions") -> list[Any]:
    """All events of a streamed request."""
    with Connection(port) as c:
        c.post(path, {**body, "stream": True})
        status, headers, raw = c.answer()
        assert status == 200, raw
        assert headers["content-type"].startswith("text/event-stream")
        return events(raw)


def texts(chunks: list[Any]) -> dict[int, str]:
    """Text per choice of a chat's or a plain completion's events."""
    out: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"] if isinstance(chunk, dict) else ():
            piece = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            out[choice["index"]] = out.get(choice["index"], "") + piece
    return out
