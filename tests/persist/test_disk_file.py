"""Whatever happens to the file: at worst a miss, never a wrong block."""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from dataclasses import fields
from pathlib import Path

import pytest
from disk_harness import BLOCK, IDENTITY, Home, other, prompt, records, truth
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatsvc.cache import diskfile
from chatsvc.cache.diskfile import DiskReader, DiskWriter, NotBelieved, Record, sweep
from chatsvc.modelfiles import ModelFiles, fingerprint

PROMPTS = [prompt(1, 30), prompt(1, 20) + prompt(5, 9), prompt(2, 17)]
SALTS = ["", "", "salt"]


def tokens(n: int) -> bytes:
    return struct.pack(f"<{BLOCK}i", *range(n * 10, n * 10 + BLOCK))


def chain(count: int) -> list[Record]:
    """0 <- 1 <- 2 ..., and the last one a root of its own."""
    out = [Record(i, i - 1, tokens(i), b"" if i else b"extra", tokens(i)) for i in range(count - 1)]
    return [*out, Record(count - 1, -1, tokens(99), b"longer extra", tokens(99))]


def write(folder: Path, rows: list[Record]) -> Path:
    writer = DiskWriter(folder, IDENTITY)
    writer.add(rows)
    writer.commit()
    return folder / IDENTITY.file_name


def read(folder: Path) -> tuple[list[Record], DiskReader]:
    reader = DiskReader(folder, IDENTITY)
    out: list[Record] = []
    while some := reader.read(40, 3):
        out += some
    reader.close()
    return out, reader


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rows = chain(7)
    path = write(tmp_path, rows)
    assert records(tmp_path) == rows
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
    header = path.stat().st_size - sum(IDENTITY.record_bytes(r.extra) for r in rows)
    assert 0 < header <= 4096, "what the size limit leaves for it"


def test_a_damaged_block_takes_only_its_descendants_with_it(tmp_path: Path) -> None:
    rows = chain(6)
    path = write(tmp_path, rows)
    data = bytearray(path.read_bytes())
    at = len(data) - sum(IDENTITY.record_bytes(r.extra) for r in rows[2:]) + 12 + 16
    data[at] ^= 1  # the first token of block 2
    path.write_bytes(data)
    found, reader = read(tmp_path)
    assert found == [rows[0], rows[1], rows[5]]
    assert reader.damaged == 3 and not reader.stopped


def test_every_single_byte_counts(tmp_path: Path) -> None:
    rows = chain(4)
    path = write(tmp_path, rows)
    whole = path.read_bytes()
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x10
        path.write_bytes(data)
        try:
            found, _ = read(tmp_path)
        except NotBelieved:
            continue
        assert len(found) < len(rows) and all(r in rows for r in found), at


def test_every_length_is_survived(tmp_path: Path) -> None:
    rows = chain(4)
    path = write(tmp_path, rows)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        try:
            found, reader = read(tmp_path)
        except NotBelieved:
            continue
        assert found == rows[: len(found)] and len(found) < len(rows)
        edge = len(whole) - sum(IDENTITY.record_bytes(r.extra) for r in rows[len(found) :])
        assert bool(reader.stopped) == (length != edge)


def test_records_of_another_file_are_not_believed(tmp_path: Path) -> None:
    """A file system that mixes the sectors of an old file and a new one: each record was once good."""
    rows = chain(4)
    old = write(tmp_path, rows).read_bytes()
    path = write(tmp_path, rows)
    new = path.read_bytes()
    assert len(old) == len(new)
    half = len(new) - sum(IDENTITY.record_bytes(r.extra) for r in rows[2:])
    path.write_bytes(new[:half] + old[half:])
    found, _ = read(tmp_path)
    assert found == rows[:2]


@pytest.mark.parametrize(
    "identity",
    [
        other(model="another"),
        other(version="0.0.0"),
        other(layout="simulated, but otherwise"),
        other(block_size=2 * BLOCK),
        other(block_bytes=8 * BLOCK),
    ],
    ids=lambda i: next(f.name for f in fields(i) if getattr(i, f.name) != getattr(IDENTITY, f.name)),
)
def test_a_foreign_file_is_not_believed(tmp_path: Path, identity: diskfile.Identity) -> None:
    path = write(tmp_path, chain(4))
    if identity.file_name != IDENTITY.file_name:
        with pytest.raises(FileNotFoundError):
            DiskReader(tmp_path, identity)
        path.rename(tmp_path / identity.file_name)  # somebody's helping hand
    with pytest.raises(NotBelieved, match="another model, layout or version"):
        DiskReader(tmp_path, identity)


def test_another_users_file_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, chain(4))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(NotBelieved, match="another user"):
        DiskReader(tmp_path, IDENTITY)


def test_sweeping_spares_who_still_writes(tmp_path: Path) -> None:
    (tmp_path / f"{IDENTITY.file_name}.dead.tmp").write_bytes(b"left by one that was killed")
    (tmp_path / "something.else").write_bytes(b"not ours")
    writer = DiskWriter(tmp_path, IDENTITY)
    sweep(tmp_path)
    writer.add(chain(3))
    sweep(tmp_path)
    writer.commit()
    assert {p.name for p in tmp_path.iterdir()} == {IDENTITY.file_name, "something.else"}
    assert records(tmp_path) == chain(3)


def test_the_fingerprint_depends_on_every_byte_and_on_no_name(tmp_path: Path) -> None:
    def of(name: str, data: bytes, config: bytes = b"{}") -> str:
        folder = tmp_path / f"{name}{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / f"{name}.safetensors").write_bytes(data)
        (folder / "config.json").write_bytes(config)
        return fingerprint(ModelFiles(folder, "hf", name))

    weights = bytes(range(256)) * 40_000
    first = of("a", weights)
    assert of("b", weights) == first
    for at in (0, 5_000_000, len(weights) - 1):
        changed = bytearray(weights)
        changed[at] ^= 1
        assert of("a", bytes(changed)) != first
    assert of("a", weights[:-1]) != first
    assert of("a", weights, b"{ }") != first


# -- through the engine: a damaged file never changes an answer ------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("saved")

    async def fill() -> None:
        async with Home(folder) as home:
            for one, salt in zip(PROMPTS, SALTS, strict=True):
                await home.ask(one, salt=salt)

    asyncio.run(fill())
    assert len(records(folder)) > 10
    return (folder / IDENTITY.file_name).read_bytes()


async def hits_with(folder: Path, data: bytes) -> tuple[int, bool]:
    """(prompt tokens found, whether every answer was right) of an engine that starts with this file."""
    (folder / IDENTITY.file_name).write_bytes(data)
    async with Home(folder, save=False) as home:
        answers = [await home.ask(one, salt=salt) for one, salt in zip(PROMPTS, SALTS, strict=True)]
    right = all(a.tokens == truth(one) for a, one in zip(answers, PROMPTS, strict=True))
    return sum(a.cached for a in answers), right


damage = st.one_of(
    st.tuples(st.just("flip"), st.floats(0, 1, exclude_max=True), st.integers(1, 255)),
    st.tuples(st.just("cut"), st.floats(0, 1, exclude_max=True), st.just(0)),
    st.tuples(st.just("drop"), st.floats(0, 1, exclude_max=True), st.integers(1, 200)),
    st.tuples(st.just("double"), st.floats(0, 1, exclude_max=True), st.integers(1, 200)),
    st.tuples(st.just("zero"), st.floats(0, 1, exclude_max=True), st.integers(1, 600)),
)


def damaged(data: bytes, how: tuple[str, float, int]) -> bytes:
    kind, where, amount = how
    at = int(where * len(data))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ amount]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "drop":
        return data[:at] + data[at + amount :]
    if kind == "double":
        return data[: at + amount] + data[at:]
    return data[:at] + bytes(min(amount, len(data) - at)) + data[at + amount :]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(how=st.lists(damage, min_size=1, max_size=3))
def test_damage_is_at_worst_a_miss(tmp_path: Path, saved: bytes, how: list[tuple[str, float, int]]) -> None:
    data = saved
    for one in how:
        data = damaged(data, one) or b""
        if not data:
            break
    _, right = asyncio.run(hits_with(tmp_path, data))
    assert right


async def test_the_log_says_what_is_left_out(tmp_path: Path, saved: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "chatsvc.engine.persistence")

    async def said(data: bytes) -> list[str]:
        caplog.clear()
        await hits_with(tmp_path, data)
        return caplog.messages

    last = saved[:-1] + bytes([saved[-1] ^ 1])
    short = "disk cache: the rest of the file is left out, because it is shorter than it should be"
    assert await said(saved) == []
    assert await said(last) == ["disk cache: 1 damaged block is left out"]
    assert await said(saved[:-1]) == [short]
    assert await said(last + b"x") == ["disk cache: 1 damaged block is left out", short]


async def test_these_tests_would_see_damage_that_is_believed(
    tmp_path: Path, saved: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    hits, right = await hits_with(tmp_path, saved)
    assert right and hits > 40
    monkeypatch.setattr(diskfile, "_sum", lambda *parts: b"always the same!")
    _, right = await hits_with(tmp_path, believed(saved))
    assert not right


def believed(data: bytes) -> bytes:
    """The file as a writer with the patched sum would have made it, with another KV in every block."""
    start = 12 + struct.unpack_from("<I", data, 8)[0]
    out = bytearray(data[:start] + b"always the same!")
    at = start + 16
    while at < len(data):
        extra = struct.unpack_from("<III", data, at)[2]
        body = at + 12 + 16
        end = body + 4 * BLOCK + extra
        out += data[at : at + 12] + b"always the same!" + data[body:end]
        out += bytes(b ^ 1 if i % 4 == 0 else b for i, b in enumerate(data[end : end + IDENTITY.block_bytes]))
        out += b"always the same!"
        at = end + IDENTITY.block_bytes + 16
    return bytes(out)
