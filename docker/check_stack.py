"""Chats through a running stack and says what it saw: python check_stack.py [URL]. Standard library only."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.parse
from typing import Any


class Stack:
    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        connection.request(method, path, None if body is None else json.dumps(body), _JSON)
        response = connection.getresponse()
        return response.status, response.read()

    def turn(self, session: str, content: str) -> dict[str, Any]:
        """One streamed turn: its text, usage, and when each piece came."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=120)
        began = time.monotonic()
        body = {"content": content, "max_tokens": 24, "temperature": 0}
        connection.request("POST", f"/v1/sessions/{session}/messages", json.dumps(body), _JSON)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        assert (response.getheader("content-type") or "").startswith("text/event-stream")
        text, usage, times, done = "", None, [], False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            data = line[6:].strip()
            if data == b"[DONE]":
                done = True
                continue
            chunk = json.loads(data)
            usage = chunk["usage"] or usage
            piece = "".join(c["delta"].get("content", "") for c in chunk["choices"])
            if piece:
                text += piece
                times.append(time.monotonic() - began)
        assert done and usage and text, (text, usage)
        return {"text": text, "usage": usage, "times": times}


_JSON = {"Content-Type": "application/json"}


def main(url: str) -> None:
    stack = Stack(url)
    assert stack.call("GET", "/ready")[0] == 200
    status, page = stack.call("GET", "/")
    assert status == 200 and b"<title>chatsvc</title>" in page
    session = json.loads(stack.call("POST", "/v1/sessions", {"title": "stack check"})[1])["id"]
    first = stack.turn(session, "What is the capital of France?")
    second = stack.turn(session, "And of Italy?")
    gaps = len(first["times"])
    assert gaps > 5 and first["times"][0] < first["times"][-1], "the tokens came in one lump"
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= (first["usage"]["total_tokens"] - 1) // 16 * 16, cached
    stored = json.loads(stack.call("GET", f"/v1/sessions/{session}")[1])
    assert [m["status"] for m in stored["messages"]] == ["done"] * 4
    print(f"first:  {first['text']!r} in {gaps} pieces, the first after {first['times'][0]:.2f} s")
    print(f"second: {second['text']!r}, {cached} of {second['usage']['prompt_tokens']} prompt tokens cached")
    assert stack.call("DELETE", f"/v1/sessions/{session}")[0] == 200
    print("check_stack: OK")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
