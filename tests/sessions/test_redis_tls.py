"""Sessions in a Redis behind TLS, with a password and with client certificates; and what is said when they are wrong.

With a real server where one is built with TLS; everywhere with a real server behind a TLS proxy of our own.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from certificates import NO_OPENSSL, Authority, Pair, have_openssl
from processes import Process
from redisserver import NO_REDIS, RedisServer, find_redis, find_tls_redis, free_port
from test_store_contract import message, session

from chatsvc.errors import ConfigError, StoreError
from chatsvc.sessions.redis import RedisStore
from chatsvc.sessions.select import open_store

PASSWORD = "p4ss:w0rd%"
QUOTED = "p4ss%3Aw0rd%25"


@dataclass
class Files:
    ca: Path
    other_ca: Path
    server: Pair
    stranger: Pair
    client: Pair
    wrong_client: Pair


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    if not have_openssl():
        pytest.skip(NO_OPENSSL)
    folder = tmp_path_factory.mktemp("tls")
    ours, others = Authority(folder, "ours"), Authority(folder, "others")
    return Files(
        ours.certificate,
        others.certificate,
        ours.sign("server"),
        ours.sign("stranger", "DNS:elsewhere.example"),
        ours.sign("client"),
        others.sign("client"),
    )


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Without TLS, but with a password."""
    if find_redis() is None:
        pytest.skip(NO_REDIS)
    with RedisServer(tmp_path_factory.mktemp("redis"), "--requirepass", PASSWORD) as server:
        yield server


@asynccontextmanager
async def proxy(target: int, pair: Pair, ca: Path | None = None) -> AsyncIterator[int]:
    """TLS outside, the plain server inside; with ``ca`` it wants a client certificate of that authority."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    meetings: set[asyncio.Task[None]] = set()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        meetings.add(task)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, up_writer))
                group.create_task(pump(up_reader, writer))
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            up_writer.transport.abort()

    server = await asyncio.start_server(meet, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for meeting in meetings:
            meeting.cancel()
        await asyncio.gather(*meetings, return_exceptions=True)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()


def url(port: int, *options: str, password: str = QUOTED) -> str:
    return f"rediss://:{password}@127.0.0.1:{port}/0?{'&'.join(options)}"


def mutual(files: Files, client: Pair) -> list[str]:
    return [f"ssl_ca_certs={files.ca}", f"ssl_certfile={client.certificate}", f"ssl_keyfile={client.key}"]


async def use(address: str) -> None:
    """What a server does with its store, the blocking read of the relay among it."""
    store = open_store(address, 60)
    await store.open()
    try:
        await store.ping()
        made = session()
        await store.create(made)
        await store.append("t", made.id, [m := message("hello")])
        got = await store.get("t", made.id)
        assert got is not None and got.messages == [m]
        assert store.relay is not None
        news: asyncio.Queue[str] = asyncio.Queue()
        await store.relay.follow("turn", news.put_nowait)
        await store.relay.add([("turn", "text")])
        assert await asyncio.wait_for(news.get(), 10) == "text"
    finally:
        await store.close()


async def refusal(address: str) -> str:
    """Why the store does not open; at once, not after a long wait."""
    store = RedisStore(address, 60)
    try:
        with pytest.raises(ConfigError) as caught:
            await asyncio.wait_for(store.open(), 10)
    finally:
        await store.close()
    assert "p4ss" not in str(caught.value) and str(caught.value).startswith("--session-store: ")
    return str(caught.value)


async def test_tls_and_a_password(files: Files, secret: RedisServer) -> None:
    async with proxy(secret.port, files.server) as port:
        await use(url(port, f"ssl_ca_certs={files.ca}"))


async def test_tls_with_certificates_of_both_sides(files: Files, secret: RedisServer) -> None:
    async with proxy(secret.port, files.server, files.ca) as port:
        await use(url(port, *mutual(files, files.client)))
        for bad in ([f"ssl_ca_certs={files.ca}"], mutual(files, files.wrong_client)):
            store = RedisStore(url(port, *bad), 60)  # our front hangs up without a reason; a real server has one
            await store.open()
            with pytest.raises(StoreError):
                await store.ping()
            await store.close()


async def test_a_real_server_with_tls(files: Files, tmp_path: Path) -> None:
    binary = find_tls_redis()
    if binary is None:
        pytest.skip("NO REDIS SERVER WITH TLS: it is tested behind a proxy only")
    port = free_port(55536)
    options = [
        "--requirepass", PASSWORD, "--tls-port", str(port), "--tls-ca-cert-file", str(files.ca),
        "--tls-cert-file", str(files.server.certificate), "--tls-key-file", str(files.server.key),
        "--tls-protocols", "TLSv1.2",
    ]  # fmt: skip
    with RedisServer(tmp_path, *options, binary=binary):
        await use(url(port, *mutual(files, files.client)))
        assert "no client certificate" in await refusal(url(port, f"ssl_ca_certs={files.ca}"))
        assert f"ssl_certfile={files.wrong_client.certificate}" in await refusal(
            url(port, *mutual(files, files.wrong_client))
        )
        wrong = mutual(files, files.client)
        wrong[0] = f"ssl_ca_certs={files.other_ca}"
        assert f"ssl_ca_certs={files.other_ca}" in await refusal(url(port, *wrong))
        assert "password" in await refusal(url(port, *mutual(files, files.client), password="guess"))


async def test_a_wrong_authority_is_named(files: Files, secret: RedisServer) -> None:
    async with proxy(secret.port, files.server) as port:
        said = await refusal(url(port, f"ssl_ca_certs={files.other_ca}"))
        assert f"ssl_ca_certs={files.other_ca}" in said and "certificate of the Redis server" in said
        assert "the system's certificates" in await refusal(url(port))


async def test_a_certificate_of_another_host_is_refused(files: Files, secret: RedisServer) -> None:
    async with proxy(secret.port, files.stranger) as port:
        assert "127.0.0.1" in await refusal(url(port, f"ssl_ca_certs={files.ca}"))


async def test_a_wrong_password_is_said(files: Files, secret: RedisServer) -> None:
    async with proxy(secret.port, files.server) as port:
        assert "password" in await refusal(url(port, f"ssl_ca_certs={files.ca}", password="guess"))
    assert "password" in await refusal(f"redis://127.0.0.1:{secret.port}/0")


async def test_a_missing_or_broken_file_is_named_at_once(files: Files, tmp_path: Path) -> None:
    nothing, broken = tmp_path / "none.pem", tmp_path / "broken.pem"
    broken.write_text("no certificate")
    own = [f"ssl_certfile={files.client.certificate}"]
    for options, named in (
        ([f"ssl_ca_certs={nothing}"], f"ssl_ca_certs={nothing}"),
        ([f"ssl_ca_certs={broken}"], f"ssl_ca_certs={broken}"),
        ([f"ssl_certfile={nothing}"], f"ssl_certfile={nothing}"),
        ([*own, f"ssl_keyfile={nothing}"], str(nothing)),
        ([*own, f"ssl_keyfile={files.server.key}"], f"ssl_certfile={files.client.certificate}"),
    ):
        with pytest.raises(ConfigError) as caught:
            open_store(url(1, *options), 60)
        assert named in str(caught.value) and "p4ss" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_store(url(1, "ssl_no_such_option=1"), 60)


async def test_a_server_that_is_away_is_no_wrong_configuration(files: Files) -> None:
    store = RedisStore(url(free_port(), f"ssl_ca_certs={files.ca}"), 60)
    await store.open()
    with pytest.raises(StoreError):
        await store.ping()
    await store.close()


async def test_two_servers_over_tls_and_one_that_does_not_start(
    files: Files, secret: RedisServer, tmp_path: Path
) -> None:
    async with proxy(secret.port, files.server, files.ca) as port:
        good = url(port, *mutual(files, files.client))
        one, two = (Process(tmp_path, name, "--session-store", good) for name in ("one", "two"))
        bad = Process(tmp_path, "bad", "--session-store", good.replace(str(files.ca), str(files.other_ca)))
        try:
            for process in (one, two):
                await asyncio.to_thread(process.wait)
            async with one.client() as a, two.client() as b:
                made = (await a.post("/v1/sessions", json={"title": "over there"})).json()["id"]
                assert (await b.get(f"/v1/sessions/{made}")).json()["title"] == "over there"
            assert await asyncio.to_thread(bad.process.wait, 60) not in (0, None)
            assert f"ssl_ca_certs={files.other_ca}" in bad.text and "Traceback" not in bad.text
        finally:
            for process in (one, two, bad):
                process.kill()
