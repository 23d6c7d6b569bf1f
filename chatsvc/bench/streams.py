"""A client that reads streams and does nothing with them: ``python -m chatsvc.bench.streams PORT STREAMS``.

In a process of its own, so that its time is not the server's. It reads until it is ended.
"""

from __future__ import annotations

import asyncio
import json
import sys

READ = 1 << 16


def post(path: str, body: object) -> bytes:
    """A request whose answer is the last on its connection."""
    data = json.dumps(body).encode()
    lines = (f"POST {path} HTTP/1.1", "Host: x", "Connection: close", "Content-Type: application/json")
    return "\r\n".join((*lines, f"Content-Length: {len(data)}", "", "")).encode() + data


async def read(port: int, number: int) -> None:
    """One stream that goes on for as long as its context has room, to its end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages = [{"role": "user", "content": f"{number}: tell me a long story"}]
    body = {"messages": messages, "stream": True, "ignore_eos": True, "temperature": 0}
    writer.write(post("/v1/chat/completions", body))
    while await reader.read(READ):
        pass
    writer.close()


async def read_all(port: int, streams: int) -> None:
    await asyncio.gather(*(read(port, i) for i in range(streams)))


if __name__ == "__main__":
    asyncio.run(read_all(int(sys.argv[1]), int(sys.argv[2])))
