"""Servers that a test starts end with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serve_process import Serve


@pytest.fixture
def started() -> Iterator[list[Serve]]:
    servers: list[Serve] = []
    yield servers
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
