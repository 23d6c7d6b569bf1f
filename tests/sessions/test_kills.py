"""Real processes that are killed, stopped and started again in the middle of answers."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from processes import Process, Told, answer, metric, sessions, take, turn
from redisserver import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

Start = Callable[..., Process]
STREAMS = 50


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []

    def make(*flags: str) -> Process:
        started.append(Process(tmp_path, f"server{len(started)}", *flags))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        assert "Traceback" not in process.text, process.text


@pytest.fixture
def durable_redis(tmp_path: Path, redis_server: RedisServer) -> Iterator[RedisServer]:
    """One of its own, which keeps what it was told when it is killed."""
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder, "--appendonly", "yes") as server:
        yield server


async def begin_all(
    http: httpx.AsyncClient, sids: list[str], **fields: Any
) -> tuple[list[Told], list[asyncio.Task[None]]]:
    tolds = [Told() for _ in sids]
    tasks = [asyncio.create_task(turn(http, sid, told, **fields)) for sid, told in zip(sids, tolds, strict=True)]
    async with asyncio.timeout(60):
        await asyncio.gather(*(told.started.wait() for told in tolds))
    return tolds, tasks


async def test_rd_03_redis_is_killed_and_started_again_during_50_streams(
    start: Start, durable_redis: RedisServer
) -> None:
    """No stream breaks, no turn is lost; sessions say 503 at once meanwhile, and all is well again by itself."""
    flags = ("--session-store", durable_redis.url, "--simulated-step-ms", "20")
    one, two = start(*flags), start(*flags)
    async with one.wait().client() as http, two.wait().client() as other:
        sids = await sessions(http, STREAMS)
        tolds, tasks = await begin_all(http, sids, max_tokens=200)
        durable_redis.stop()  # kill -9
        assert (await http.get(f"/v1/sessions/{sids[0]}")).status_code == 503
        began = time.monotonic()
        for _ in range(5):
            assert (await http.get(f"/v1/sessions/{sids[0]}")).status_code == 503
        assert (await http.post("/v1/sessions", json={})).status_code == 503
        assert time.monotonic() - began < 2.0, "it is known that Redis is away: nobody waits for it"
        ready = await http.get("/ready")
        assert ready.status_code == 200 and ready.json()["store"] == "away"
        stateless = {"prompt": "hi", "max_tokens": 3}
        assert (await http.post("/v1/completions", json=stateless)).status_code == 200
        await asyncio.sleep(0.5)
        assert not any(told.error for told in tolds)
        durable_redis.start()
        await asyncio.gather(*tasks)
        assert all(told.done and told.error is None for told in tolds)
        for sid, told in zip(sids, tolds, strict=True):
            for client in (http, other):
                message = await answer(client, sid)
                assert (message["status"], message["content"]) == ("done", told.text)
            assert message["usage"]["completion_tokens"] == 200
        assert await metric(http, "session_store_errors_total") > 0
        assert (await http.get("/ready")).json()["store"] == "ok"
        tolds, tasks = await begin_all(http, sids[:2], max_tokens=5)
        await asyncio.gather(*tasks)
        assert all(told.done for told in tolds)


async def test_rd_03_redis_comes_later_than_the_server(start: Start, durable_redis: RedisServer) -> None:
    durable_redis.stop()
    server = start("--session-store", durable_redis.url)
    async with server.wait().client() as http:
        ready = await http.get("/ready")
        assert ready.status_code == 200 and ready.json()["store"] == "away"
        assert (await http.post("/v1/sessions", json={})).status_code == 503
        durable_redis.start()
        async with asyncio.timeout(30):
            while (await http.post("/v1/sessions", json={})).status_code != 201:
                await asyncio.sleep(0.05)
        (told,), (task,) = await begin_all(http, await sessions(http, 1), max_tokens=5)
        await task
        assert told.done


async def test_a_killed_server_leaves_its_turn_to_the_others(start: Start, durable_redis: RedisServer) -> None:
    """kill -9 of the owner: whoever reads elsewhere is told, and after the lease the turn is interrupted."""
    flags = ("--session-store", durable_redis.url, "--simulated-step-ms", "20")
    one, two = start(*flags), start(*flags)
    async with one.wait().client() as http, two.wait().client() as other:
        (sid,) = await sessions(http, 1)
        (told,), (task,) = await begin_all(http, [sid], max_tokens=4000)
        joined = Told()

        async def join() -> None:
            async with other.stream("GET", f"/v1/sessions/{sid}/stream") as response:
                assert response.status_code == 200
                await take(response, joined)

        joining = asyncio.create_task(join())
        await asyncio.wait_for(joined.started.wait(), 30)
        await asyncio.sleep(1.5)
        one.kill()
        await task
        async with asyncio.timeout(30):
            await joining
        assert joined.error is not None and not joined.done
        message = await answer(other, sid)
        assert message["status"] == "interrupted" and told.text.startswith(message["content"])
        assert len(message["content"]) > 0
        (after,), (task,) = await begin_all(other, [sid], max_tokens=5)
        await task
        assert after.done


async def test_kill_9_in_the_middle_of_a_turn_costs_its_last_second(start: Start, tmp_path: Path) -> None:
    """SQLite: the session reads, the turn is interrupted with its text, the next turn works."""
    flags = ("--session-store", f"sqlite:///{tmp_path}/s.db", "--simulated-step-ms", "10")
    server = start(*flags)
    async with server.wait().client() as http:
        (sid,) = await sessions(http, 1)
        (told,), (task,) = await begin_all(http, [sid], max_tokens=8000)
        times: list[tuple[float, int]] = []
        for _ in range(60):
            times.append((time.monotonic(), len(told.text)))
            await asyncio.sleep(0.05)
        second = start(*flags)  # one file, one process
        assert second.process.wait(60) != 0
        assert "redis://" in second.text and "in use by another chatsvc process" in second.text
        for _ in range(30):
            times.append((time.monotonic(), len(told.text)))
            await asyncio.sleep(0.05)
        killed = time.monotonic()
        server.kill()
        await task
    again = start(*flags)
    async with again.wait().client() as http:
        message = await answer(http, sid)
        assert message["status"] == "interrupted" and told.text.startswith(message["content"])
        a_second_ago = max(length for at, length in times if at < killed - 1.5)  # one, and this machine's slowness
        assert len(message["content"]) >= a_second_ago > 0
        (after,), (task,) = await begin_all(http, [sid], max_tokens=5)
        await task
        assert after.done


async def test_sh_04_sigterm_lets_50_streams_finish(start: Start, tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    server = start("--session-store", store, "--simulated-step-ms", "20", "--drain-timeout", "60")
    async with server.wait().client() as http:
        sids = await sessions(http, STREAMS + 1)
        spare = sids.pop()
        tolds, tasks = await begin_all(http, sids, max_tokens=150)
        server.process.send_signal(signal.SIGTERM)
        while (await http.get("/ready")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await http.get("/health")).status_code == 200
        for path, body in (
            (f"/v1/sessions/{spare}/messages", {"content": "new"}),
            ("/v1/completions", {"prompt": "new"}),
        ):
            refused = await http.post(path, json=body)
            assert refused.status_code == 503 and refused.headers["retry-after"], refused.text
        assert (await http.get(f"/v1/sessions/{spare}")).status_code == 200
        await asyncio.gather(*tasks)
        assert all(told.done and told.error is None for told in tolds)
        assert server.process.wait(60) == 0
    again = start("--session-store", store)
    async with again.wait().client() as http:
        for sid, told in zip(sids, tolds, strict=True):
            message = await answer(http, sid)
            assert (message["status"], message["content"]) == ("done", told.text)


async def test_sh_05_what_is_left_at_the_end_of_the_drain_time_is_ended_in_order(start: Start, tmp_path: Path) -> None:
    """A frozen reader does not hold the exit; the others get an error event, and every text is in its session."""
    store = f"sqlite:///{tmp_path}/s.db"
    server = start("--session-store", store, "--simulated-step-ms", "20", "--drain-timeout", "1")
    async with server.wait().client() as http:
        sids = await sessions(http, 2)
        tolds, tasks = await begin_all(http, sids, max_tokens=4000)
        frozen = socket.create_connection((httpx.URL(server.url).host, httpx.URL(server.url).port or 0))
        body = b'{"prompt":"x","max_tokens":4000,"stream":true,"ignore_eos":true}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        frozen.sendall(head % len(body) + body)
        assert frozen.recv(12) == b"HTTP/1.1 200"  # and never reads again
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        await asyncio.gather(*tasks)
        assert all(told.error is not None and not told.done for told in tolds)
        assert server.process.wait(60) == 0
        assert time.monotonic() - began < 15
        frozen.close()
    again = start("--session-store", store)
    async with again.wait().client() as http:
        for sid, told in zip(sids, tolds, strict=True):
            message = await answer(http, sid)
            assert (message["status"], message["content"]) == ("interrupted", told.text)


async def test_the_end_of_an_answer_is_stored_though_redis_is_away_at_the_exit(
    start: Start, durable_redis: RedisServer
) -> None:
    """And a second signal does not wait for it (SH-05)."""
    flags = ("--session-store", durable_redis.url, "--simulated-step-ms", "10", "--drain-timeout", "60")
    servers = [start(*flags), start(*flags)]
    for server, patient in zip(servers, (True, False), strict=True):
        async with server.wait().client() as http:
            (sid,) = await sessions(http, 1)
            (told,), (task,) = await begin_all(http, [sid], max_tokens=100)
            durable_redis.stop()
            server.process.send_signal(signal.SIGTERM)
            await task
            if patient:
                durable_redis.start()
                assert server.process.wait(60) == 0
                async with servers[1].wait().client() as other:
                    async with asyncio.timeout(30):
                        while (await other.get(f"/v1/sessions/{sid}")).status_code == 503:
                            await asyncio.sleep(0.1)
                    message = await answer(other, sid)
                    assert (message["status"], message["content"]) == ("done", told.text)
            else:
                began = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(60) == 128 + signal.SIGTERM
                assert time.monotonic() - began < 15
