"""ST-03: with every middleware switched on a client that leaves still ends its request; and what browsers may do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from doorserver import CHAT, MESSAGES, Running, secret_of, serving

from chatsvc.api.foreign import same_host
from chatsvc.api.services import ApiSettings
from chatsvc.config import ServeConfig
from chatsvc.errors import ConfigError

pytestmark = pytest.mark.asyncio(loop_scope="module")

HOME = "https://chat.example"
ORIGIN = {"Origin": HOME}
ENDLESS: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4000, "ignore_eos": True}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def door() -> AsyncIterator[Running]:
    settings = ApiSettings(ping_interval=5.0, cors_origins=(HOME, "http://localhost:3000"), request_timeout=600)
    limits = {"requests_per_minute": 10_000, "tokens_per_minute": 10**9, "max_concurrent": 50}
    async with serving(step=0.002, blocks=4096, settings=settings, ann=limits) as running:
        yield running


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_ST_03_a_client_that_leaves_is_seen_through_all_of_them(door: Running, streamed: bool, path: str) -> None:
    body = {**ENDLESS, "stream": streamed}
    if path != CHAT:
        body = {"prompt": ["a", "b"], "max_tokens": 4000, "ignore_eos": True, "stream": streamed}
    headers = {
        **ORIGIN,
        "X-Request-Id": "leaving",
        "X-Request-Timeout": "300",
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    }
    clients = [httpx.AsyncClient(base_url=door.url, trust_env=False, timeout=20) for _ in range(6)]
    for client in clients:
        client.headers["Authorization"] = f"Bearer {secret_of('ann')}"
    tasks = [asyncio.create_task(client.post(path, json=body, headers=headers)) for client in clients]
    await door.until(lambda: door.running("ann") == 6)
    await door.until(lambda: all(g.num_output_tokens > 3 for _, g in door.services.desk._running.values()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        await client.aclose()
    await door.until(lambda: door.running("ann") == 0)
    await door.idle()
    assert door.engine.scheduler.manager.pool.num_used == 0
    assert door.services.desk._running == {}


async def preflight(door: Running, origin: str, **headers: str) -> httpx.Response:
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST", **headers}
    return await door.nobody.options(CHAT, headers=asked)


async def test_a_page_of_a_known_origin_may_call(door: Running) -> None:
    asks = {"Access-Control-Request-Headers": "authorization, content-type, last-event-id, x-stainless-os"}
    allowed = await preflight(door, HOME, **asks)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == HOME
    granted = allowed.headers["access-control-allow-headers"].lower()
    assert all(name.strip() in granted for name in asks["Access-Control-Request-Headers"].split(","))
    for status, answer in (
        (200, await door["ann"].post(CHAT, json={**ENDLESS, "max_tokens": 1}, headers=ORIGIN)),
        (401, await door.nobody.get("/v1/models", headers=ORIGIN)),
        (400, await door["ann"].post(CHAT, json={}, headers=ORIGIN)),
        (404, await door["ann"].get("/nothing", headers=ORIGIN)),
    ):
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == HOME and "Origin" in answer.headers["vary"]
        assert "access-control-allow-credentials" not in answer.headers
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
    async with door["ann"].stream("POST", CHAT, json={**ENDLESS, "max_tokens": 2, "stream": True}, headers=ORIGIN) as s:
        assert s.headers["access-control-allow-origin"] == HOME
        assert "[DONE]" in (await s.aread()).decode()


async def test_a_fault_inside_can_be_read_by_the_page_too(door: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("not one of ours")

    with monkeypatch.context() as m:
        m.setattr(door.engine, "generate", broken)
        answer = await door["ann"].post(CHAT, json=ENDLESS, headers=ORIGIN)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (500, HOME)


async def test_other_origins_get_nothing(door: Running) -> None:
    for origin in ("https://evil.example", "https://chat.example.evil.example", "http://chat.example", "null"):
        refused = await preflight(door, origin)
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        answer = await door["ann"].get("/v1/models", headers={"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


async def test_a_preflight_opens_no_other_door(door: Running) -> None:
    """Only what is a preflight is answered without a key."""
    assert (await door.nobody.options("/v1/models", headers=ORIGIN)).status_code == 401
    assert (await door.nobody.options("/v1/models")).status_code == 401
    asked = {**ORIGIN, "Access-Control-Request-Method": "GET"}
    assert (await door.nobody.get("/metrics", headers=asked)).status_code == 401


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_browser_starts_nothing_for_another_page(site: str) -> None:
    """A server without keys on one's own machine: any page could send it a simple request, without a preflight."""
    async with serving(settings=ApiSettings(cors_origins=(HOME,))) as door:

        async def ask(method: str, path: str, **headers: str) -> int:
            body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
            return (await door.nobody.request(method, path, content=body, headers=headers)).status_code

        foreign = {"Sec-Fetch-Site": site, "Origin": "https://evil.example"}
        assert await ask("POST", CHAT, **foreign) == 403
        assert await ask("POST", "/v1/sessions", **{"Sec-Fetch-Site": site}) == 403
        assert await ask("DELETE", "/v1/sessions/x", **foreign) == 403
        assert await ask("GET", "/", **foreign) == 200  # a link to the page
        assert await ask("POST", CHAT, **{**foreign, **ORIGIN}) == 200
        for own in ({"Sec-Fetch-Site": "same-origin", "Origin": door.url}, {"Sec-Fetch-Site": "none"}, {}):
            assert await ask("POST", CHAT, **own) == 200


async def test_over_plain_http_a_browser_tells_its_page_by_origin_alone() -> None:
    async with serving(settings=ApiSettings(cors_origins=(HOME,))) as door:

        async def ask(method: str = "POST", **headers: str) -> int:
            body = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}'
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return (await door.nobody.request(method, CHAT, content=body, headers=named)).status_code

        lan = "192.168.1.5:8000"
        for origin in ("null", "http://evil.example", "http://192.168.1.5", "http://192.168.1.5:8001", "http://[x"):
            assert await ask(Host=lan, Origin=origin) == 403, origin
            assert await ask("DELETE", Host=lan, Origin=origin) == 403, origin
        assert await ask("GET", Host=lan, Origin="http://evil.example") == 405  # no such route, but not refused
        for origin in (f"http://{lan}", HOME):
            assert await ask(Host=lan, Origin=origin) == 200, origin
        # A proxy that hands its name on, and one that does not: then the browser has to say it, as it does over https.
        assert await ask(Host="public.name", Origin="https://public.name") == 200
        assert await ask(Host="127.0.0.1:8000", Origin="https://public.name") == 403
        assert await ask(Host="127.0.0.1:8000", Origin="https://public.name", Sec_Fetch_Site="same-origin") == 200


@pytest.mark.parametrize(
    ("origin", "host", "same"),
    [
        ("http://a.example", "a.example", True),
        ("http://a.example", "A.Example:80", True),
        ("https://a.example", "a.example:443", True),
        ("http://a.example", "a.example:443", False),
        ("https://a.example:8443", "a.example", False),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://[::1]:8000", "[::2]:8000", False),
        ("http://a.example.evil.example", "a.example", False),
        ("http://a.example:99999", "a.example:99999", False),
        ("null", "null", False),
        ("null", "", False),
        ("", "", False),
    ],
)
async def test_the_host_of_an_origin(origin: str, host: str, same: bool) -> None:
    assert same_host(origin, host) is same


async def test_without_the_flag_there_is_no_cors() -> None:
    async with serving(ann={}) as door:
        refused = await preflight(door, HOME)
        assert refused.status_code == 401 and "access-control-allow-origin" not in refused.headers
        answer = await door["ann"].get("/v1/models", headers=ORIGIN)
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_what_is_an_origin() -> None:
    assert ServeConfig.of().cors_origins == ()
    assert ServeConfig.of(cors_origins=" https://a.example/, http://[::1]:3000,").cors_origins == (
        "https://a.example",
        "http://[::1]:3000",
    )
    assert ServeConfig.of(cors_origins="*").cors_origins == ("*",)
    for wrong in ("a.example", "https://a.example/path", "https://A.example", "ftp://a.example", "https://*"):
        with pytest.raises(ConfigError, match="--cors-origins: an origin is"):
            ServeConfig.of(cors_origins=wrong)
