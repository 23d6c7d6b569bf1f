"""The key file: what is in it, what is wrong with it, and how a server follows its changes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from doorserver import digest_of, key_file, secret_of

from chatsvc.api.keys import KeyFile, new_key, parse_keys, read_keys
from chatsvc.cli.key import command
from chatsvc.errors import ConfigError

D = digest_of("x")


def test_what_stands_in_a_file() -> None:
    text = key_file(
        ann={},
        bob={"tenant": "t", "allow": ["chat", "debug"], "requests_per_minute": 3, "tokens_per_minute": 9},
        old={"tenant": ""},
    )
    ann, bob, old = parse_keys(text).keys
    assert ann.tenant == f"key:{digest_of('ann')[:32]}" and ann.unlimited and not ann.limits
    assert (bob.tenant, sorted(bob.allow), bob.limits.requests_per_minute) == ("t", ["chat", "debug"], 3)
    assert old.tenant == "" and parse_keys(text).find(secret_of("bob").encode()) == bob


PASTED = "sk-chatsvc-somebody-pasted-the-key-itself"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "from 1 to"),
        ("key = []", "from 1 to 1024"),
        ("[[keys]]\nname='a'", "nothing but"),
        ("key = 3", "from 1 to"),
        ("[[key]]\nname='a'", "key 1: sha256 is missing"),
        (f"[[key]]\nsha256='{D}'", "key 1: name is missing"),
        (f"[[key]]\nname='a'\nsha256='{PASTED}'", "key 1: sha256 has to be 64"),
        (f"[[key]]\nname='a'\nsha256='{D.upper()}'", "key 1: sha256 has to be 64 small"),
        (f"[[key]]\nname='a b'\nsha256='{D}'", "key 1: name has to be"),
        (f"[[key]]\nname='a\\n'\nsha256='{D}'", "key 1: name has to be"),
        (f'[[key]]\nname="a\\n"\nsha256="{D}"', "key 1: name has to be"),
        (f"[[key]]\nname='a'\nsha256='{D}'\ntenant='key:1'", "key 1: tenant has to be"),
        (f"[[key]]\nname='a'\nsha256='{D}'\nallow=[]", "key 1: allow has to be"),
        (f"[[key]]\nname='a'\nsha256='{D}'\nallow=['everything']", "key 1: allow has to be a list with some of chat"),
        (f"[[key]]\nname='a'\nsha256='{D}'\nmax_concurrent=0", "key 1: max_concurrent has to be a whole number"),
        (f"[[key]]\nname='a'\nsha256='{D}'\nrequests_per_minute=1.5", "requests_per_minute has to be"),
        (f"[[key]]\nname='a'\nsha256='{D}'\ntokens_per_minute='9'", "tokens_per_minute has to be"),
        (f"[[key]]\nname='a'\nsha256='{D}'\nkey='{PASTED}'", "key 1: there is an unknown field"),
        (f"[[key]]\nname='a'\nsha256='{D}'\n{PASTED}='x'", "key 1: there is an unknown field"),
        (f"[[key]]\nname='a'\nsha256={PASTED}", r"not valid TOML \(at line 3\)"),
        (f"[[key]]\nname='a'\nsha256='{D}'\n[[key]]\nname='a'\nsha256='{digest_of('y')}'", "stands there twice"),
        (f"[[key]]\nname='a'\nsha256='{D}'\n[[key]]\nname='b'\nsha256='{D}'", r"key 2 \(b\): .* twice"),
    ],
)
def test_what_is_wrong_is_said_without_its_value(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_keys(text)
    assert PASTED not in str(caught.value) and D not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # nor in a traceback


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "keys.toml")
    (tmp_path / "keys.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        KeyFile(tmp_path / "keys.toml")
    with pytest.raises(ConfigError, match="directory"):
        read_keys(tmp_path)


def test_new_keys_are_random_and_long() -> None:
    made = {new_key()[0] for _ in range(100)}
    assert len(made) == 100 and all(re.fullmatch(r"sk-chatsvc-[A-Za-z0-9_-]{43}", key) for key in made)


async def follow(path: Path) -> tuple[KeyFile, asyncio.Task[None]]:
    keys = KeyFile(path)
    return keys, asyncio.create_task(keys.watch(0.01))


async def until(condition: object, keys: KeyFile) -> None:
    async with asyncio.timeout(10):
        while not condition(keys.current):  # type: ignore[operator]
            await asyncio.sleep(0.005)


def names(path: KeyFile) -> list[str]:
    return [k.name for k in path.current.keys]


async def test_changes_are_followed_and_a_broken_file_keeps_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(key_file(ann={}))
    keys, task = await follow(path)
    try:
        path.write_text(key_file(ann={}, bob={}))
        await until(lambda now: len(now.keys) == 2, keys)
        for broken in ("[[key", "", None):
            caplog.clear()
            path.write_text(broken) if broken is not None else path.unlink()
            async with asyncio.timeout(10):
                while "kept" not in caplog.text:
                    await asyncio.sleep(0.005)
            assert names(keys) == ["ann", "bob"]
        caplog.clear()
        await asyncio.sleep(0.1)
        assert "kept" not in caplog.text  # complained about once, not at every look
        other = tmp_path / "other.toml"
        other.write_text(key_file(eve={}))
        path.symlink_to(other)  # as a mounted secret changes
        await until(lambda now: now.keys[0].name == "eve", keys)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_a_nudge_reads_also_what_looks_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(key_file(ann={}))
    keys = KeyFile(path)
    task = asyncio.create_task(keys.watch(3600))
    try:
        stamp = path.stat()
        path.write_text(key_file(bob={}))
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        await asyncio.sleep(0.01)
        keys.nudge()
        await until(lambda now: now.keys[0].name == "bob", keys)
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def run(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(command, list(words))
    return done.exit_code, done.stdout, f"{done.stderr}{done.exception or ''}"


def test_the_verb_makes_keys_that_the_file_knows(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    status, key, _ = run("new", "ann", "--file", str(path), "--tenant", "t", "--allow", "chat", "--max-concurrent", "2")
    assert status == 0 and path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text().rstrip())  # somebody's editor leaves no line end
    assert run("new", "bob", "--file", str(path), "--tokens-per-minute", "5")[0] == 0
    ann, bob = read_keys(path).keys
    found = read_keys(path).find(key.strip().encode())
    assert found == ann and (ann.tenant, set(ann.allow), ann.limits.max_concurrent) == ("t", {"chat"}, 2)
    assert bob.limits.tokens_per_minute == 5 and key.strip() not in path.read_text()
    table = run("list", "--file", str(path))[1]
    assert "ann" in table and "(its own)" in table and ann.digest.hex() not in table


@pytest.mark.parametrize("before", ["", "\n\n", "# the team's keys\n"])
def test_the_verb_begins_a_file_that_says_nothing(tmp_path: Path, before: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(before)
    assert run("new", "ann", "--file", str(path))[0] == 0
    assert path.read_text().startswith(before) and [k.name for k in read_keys(path).keys] == ["ann"]


def test_the_verb_refuses_before_it_writes(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    run("new", "ann", "--file", str(path))
    before = path.read_bytes()
    for words in (["ann"], ["a b"], ["x", "--tenant", "a:b"]):
        status, out, said = run("new", *words, "--file", str(path))
        assert status != 0 and out == "" and said
    assert path.read_bytes() == before
    for wrong in (b"broken", b"other = 1", b"\xff"):
        path.write_bytes(wrong)
        assert run("new", "bob", "--file", str(path))[0] != 0 and path.read_bytes() == wrong
    assert run("new", "bob")[0] == 2  # which file?


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    keys, out = tmp_path / "keys.toml", tmp_path / "out"
    keys.write_text(key_file(ann={}))
    env = {k: v for k, v in os.environ.items() if not k.startswith("CHATSVC_")}
    env |= {"CHATSVC_API_KEY_FILE": str(keys), "CHATSVC_SESSION_STORE": "memory://"}
    line = [
        sys.executable,
        "-c",
        "from chatsvc.cli.main import main; main()",
        "serve",
        "--executor",
        "simulated",
        "--port=0",
    ]
    with out.open("wb") as log:
        process = subprocess.Popen(line, env=env, cwd=tmp_path, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 60
        while not (found := re.search(r"Chat page:\s+(\S+)/\n", out.read_text())):
            assert time.monotonic() < end and process.poll() is None, out.read_text()
            time.sleep(0.05)
        yield process, found[1], tmp_path
    finally:
        process.terminate()
        assert process.wait(30) == 0, out.read_text()


def test_a_real_server_with_a_key_file(served: tuple[subprocess.Popen[bytes], str, Path]) -> None:
    process, url, folder = served

    def status(name: str) -> int:
        headers = {"Authorization": f"Bearer {secret_of(name)}"}
        return httpx.get(url + "/v1/models", headers=headers, trust_env=False, timeout=20).status_code

    def until_in(name: str) -> None:
        end = time.monotonic() + 20
        while status(name) != 200:
            assert time.monotonic() < end
            time.sleep(0.05)

    assert (status("ann"), status("bob")) == (200, 401)
    assert httpx.get(url + "/health", trust_env=False, timeout=20).status_code == 200
    (folder / "keys.toml").write_text(key_file(bob={}))
    process.send_signal(signal.SIGHUP)
    until_in("bob")
    assert status("ann") == 401
    (folder / "keys.toml").write_text("[[key]]\nsha256 = 3")
    process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 20
    while "kept" not in (log := (folder / "out").read_text()):
        assert time.monotonic() < end, log
        time.sleep(0.05)
    assert status("bob") == 200
    assert "sk-test" not in log and digest_of("bob") not in log


def test_a_start_without_a_good_file_is_refused(tmp_path: Path) -> None:
    from chatsvc.cli import serve

    for text, words in ((None, "No such file"), ("[[key]]", "name is missing")):
        if text is not None:
            (tmp_path / "k.toml").write_text(text)
        done = CliRunner().invoke(serve.command, ["--api-key-file", str(tmp_path / "k.toml"), "--port", "0"])
        assert isinstance(done.exception, ConfigError) and words in str(done.exception)
        assert "--api-key-file" in str(done.exception)


def test_the_open_door_remark_goes_away_with_keys() -> None:
    from chatsvc.cli.remarks import remarks
    from chatsvc.config import ServeConfig

    assert len(list(remarks(ServeConfig.of(host="0.0.0.0"), {}))) == 1
    assert list(remarks(ServeConfig.of(host="0.0.0.0", api_key_file="k.toml"), {})) == []
