"""One server for all tests of the API; each test finds it reset."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from scripted import ScriptedEngine, Server


@pytest.fixture(scope="session")
def _server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def server(_server: Server) -> Iterator[Server]:
    _server.reset()
    yield _server
    _server.call(_server.engine.gate.set)


@pytest.fixture
def engine(server: Server) -> ScriptedEngine:
    return server.engine


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20, trust_env=False) as client:
        yield client


@pytest.fixture
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client
