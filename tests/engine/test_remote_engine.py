"""``--engine process``: the same engine behind a socket, and every way in which the other process can fail us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import FIRST, LAST, text_of
from remote_parts import BLOCKS, SIZE
from remote_parts import engine as local_engine

from chatsvc.engine.child import Child
from chatsvc.engine.output import Generation
from chatsvc.engine.remote import RemoteEngine
from chatsvc.engine.wire import Ask, Call, PlainTokens, connect, frame, hear, hear_usual, receive
from chatsvc.errors import (
    ConfigError,
    Conflict,
    ContextLengthExceeded,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
)
from chatsvc.runtime.simulated import hashed_token
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SamplingRow, ScheduledRow

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def parts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", HERE)


@contextlib.asynccontextmanager
async def remote(step: float = 0.0, where: str = "engine", **settings: Any) -> AsyncIterator[RemoteEngine]:
    engine = await RemoteEngine.launch(f"remote_parts:{where}", step, *([settings] if settings else []))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


def ask(engine: RemoteEngine, name: str, prompt: list[int] | int = 3, **fields: Any) -> Generation:
    ids = [i % 200 for i in range(prompt)] if isinstance(prompt, int) else prompt
    params = SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **fields})
    return engine.generate(request_id=name, prompt_token_ids=ids, params=params)


def truth(prompt: list[int], count: int, *, choice: int = 0, **fields: Any) -> list[int]:
    """What the request alone would get, from the executor's token function and nothing else."""
    params = SamplingParams(**{"max_tokens": count, "temperature": 0.0, **fields})
    token, context = hashed_token(FIRST, LAST), array("i", prompt)
    for _ in range(count):
        context.append(token(context, ScheduledRow(0, (), 0, (), 0, SamplingRow(params, choice, len(context)))))
    return context[len(prompt) :].tolist()


async def until(condition: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def metric(engine: RemoteEngine, name: str, **labels: str) -> float:
    await engine.metrics.refresh()
    value = engine.metrics.registry.get_sample_value("chatsvc_" + name, labels)
    assert value is not None, name
    return value


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# -- the same engine -------------------------------------------------------------------------------------------


async def test_tokens_text_ends_and_counts_are_the_engines_own() -> None:
    async with remote() as engine:
        prompt = list(range(40))
        plain = ask(engine, "plain", prompt, max_tokens=20)
        two = ask(engine, "two", prompt, n=2, temperature=1.0, seed=5)
        detailed = ask(engine, "detailed", prompt, logprobs=1)
        letters = bytes(truth(prompt, 20)).decode()
        stopped = ask(engine, "stopped", prompt, max_tokens=20, stop=(letters[3:5], letters[10:]))
        readers = await asyncio.gather(*map(text_of, (plain, two, detailed, stopped)))
        assert readers[0] == [letters] and plain.logs[0].token_ids == truth(prompt, 20)
        for choice in (0, 1):
            assert two.logs[choice].token_ids == truth(prompt, 8, choice=choice, temperature=1.0, seed=5)
        assert all(t.logprob == -0.5 and t.top == ((t.token_id, -0.5),) for t in detailed.logs[0].tokens)
        assert readers[3] == [letters[:3]], "the stop string ended it in the step that completed it"
        assert (stopped.logs[0].finish_reason, stopped.logs[0].stop_reason) == ("stop", letters[3:5])
        again = ask(engine, "again", prompt)
        await again.wait()
        assert again.num_cached_tokens == 39 and again.logs[0].finish_reason == "length"
        at = again.timings
        assert at.scheduled and at.first_token and at.finished
        assert at.arrival < at.scheduled < at.first_token <= at.finished
        assert await engine.drained(5)
        assert engine.num_requests == 0
        assert await metric(engine, "requests_finished_total", reason="length") == 5
        assert await metric(engine, "requests_finished_total", reason="stop") == 1
        assert await metric(engine, "kv_blocks", state="used") == 0


async def test_metrics_are_one_set() -> None:
    async with remote() as engine:
        await engine.metrics.refresh()
        here = {family.name for family in engine.metrics.registry.collect()}
        local = local_engine()
        await local.start()
        there = {family.name for family in local.metrics.registry.collect()}
        await local.stop()
        assert here == there | {"chatsvc_engine_loop_lag_seconds"}
        engine.metrics.store_errors.inc()
        assert await metric(engine, "session_store_errors_total") == 1


async def test_what_can_be_refused_is_refused_at_once() -> None:
    async with remote(1.0, max_queue=2) as engine:
        assert engine.limit == BLOCKS * SIZE
        with pytest.raises(InvalidRequest):
            ask(engine, "a", [])
        with pytest.raises(ContextLengthExceeded):
            ask(engine, "a", engine.limit)
        first = ask(engine, "a")
        await until(lambda: first.timings.scheduled)
        ask(engine, "b")
        with pytest.raises(Conflict):
            ask(engine, "b")
        ask(engine, "c")
        with pytest.raises(Overloaded) as refused:
            ask(engine, "d")
        assert refused.value.status == 429
        engine.begin_drain()
        assert engine.healthy and not engine.ready
        with pytest.raises(Overloaded) as refused:
            ask(engine, "d")
        assert refused.value.status == 503


async def test_a_cancel_is_seen_at_once_and_reaches_the_engine() -> None:
    async with remote(0.02) as engine:
        a, b = ask(engine, "a", max_tokens=500), ask(engine, "b", max_tokens=500)
        await until(lambda: a.logs[0].tokens and b.logs[0].tokens)
        assert engine.cancel("a") and not engine.cancel("a") and not engine.cancel("unknown")
        assert a.finished and a.logs[0].finish_reason == "abort"
        b.cancel()
        told = a.logs[0].token_ids
        assert await engine.drained(10)
        await until(lambda: engine.num_requests == 0)
        assert a.logs[0].token_ids == told == truth([0, 1, 2], len(told))
        assert await metric(engine, "requests_finished_total", reason="abort") == 2
        assert await metric(engine, "kv_blocks", state="used") == 0


async def test_SH_08_an_end_with_an_error_is_seen_at_once_and_reaches_the_engine() -> None:
    async with remote(0.02) as engine:
        a = ask(engine, "a", max_tokens=500)
        await until(lambda: a.logs[0].tokens)
        a.cancel("too late", 408)
        a.cancel()  # the first end counts
        log = a.logs[0]
        assert (log.finish_reason, log.error, log.error_status) == ("error", "too late", 408)
        told = log.token_ids
        await until(lambda: engine.num_requests == 0)
        assert log.token_ids == told == truth([0, 1, 2], len(told))
        async with asyncio.timeout(10):
            while await metric(engine, "kv_blocks", state="used"):  # until the step under way is over
                await asyncio.sleep(0.01)


async def test_what_was_held_back_is_shown_when_an_answer_is_cut() -> None:
    async with remote(0.05, "emoji") as engine:
        cut = ask(engine, "cut", max_tokens=500, stop=("🚀🚀🚀🚀x",))
        await until(lambda: len(cut.logs[0].tokens) >= 6)
        cut.cancel()
        whole, part = divmod(len(cut.logs[0].tokens), 4)
        assert cut.logs[0].text == "🚀" * whole + ("\ufffd" if part else "")


async def test_the_block_map_and_a_reader_that_leaves() -> None:
    async with remote(0.01) as engine:
        events = engine.kv_events()
        first = await anext(events)
        assert first["type"] == "snapshot" and len(first["blocks"]) == BLOCKS
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.05)
        ask(engine, "a", max_tokens=300)
        change = await asyncio.wait_for(waiting, 10)
        assert change["type"] == "change" and change["sequences"][0]["id"] == "a:0"
        await asyncio.sleep(0.15)
        await events.aclose()  # type: ignore[attr-defined]
        idle = engine.kv_events()
        assert (await anext(idle))["type"] == "snapshot"
        leaves = asyncio.ensure_future(anext(idle))
        await asyncio.sleep(0.05)
        leaves.cancel()
        await asyncio.wait([leaves])
        await idle.aclose()  # type: ignore[attr-defined]
        assert await metric(engine, "requests_running") == 1, "it still answers"
        engine.cancel("a")


async def test_a_slow_reader_gets_everything_once_in_few_messages() -> None:
    here, there = socket.socketpair()
    for sock in (here, there):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    child = Child(await connect(there))
    child._writer.transport.set_write_buffer_limits(8192)
    running_child = asyncio.create_task(child.run())
    reader, writer = await connect(here)
    params = SamplingParams(max_tokens=180, temperature=0.0, logprobs=1)
    for call in (Call(0, "build", ("remote_parts:engine", ())), Call(1, "start", ())):
        writer.write(frame(call))
        while not (await receive(reader)).replies:
            pass
    for i in range(4):
        writer.write(frame(Ask(i, str(i), [i], params, "", "", 0)))
    reader._transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: len(child._tellers) == 4)
    await until(lambda: child.engine.num_requests == 0)
    assert child.engine.executor.steps >= 180  # type: ignore[attr-defined]
    reader._transport.resume_reading()  # type: ignore[attr-defined]
    logs = [Generation(str(i), [i], 1, lambda: None, 0.0) for i in range(4)]
    batches, tokens = 0, PlainTokens()
    while not all(g.finished for g in logs):
        batches += 1
        batch = await receive(reader)
        hear_usual(dict(enumerate(logs)), batch.usual, tokens)
        for news in batch.news:
            hear(logs[news[0]], news, tokens)
    assert all(g.logs[0].token_ids == truth([i], 180) for i, g in enumerate(logs))
    assert batches < 130, "a message for each step would be 180"
    writer.transport.abort()
    await running_child
    child._writer.transport.abort()
    await child.engine.stop()


# -- starting --------------------------------------------------------------------------------------------------


async def test_what_is_wrong_with_the_configuration_comes_over() -> None:
    with pytest.raises(ConfigError, match="lower --num-kv-blocks"):
        await RemoteEngine.launch("remote_parts:refuses")


async def test_a_build_that_breaks_is_an_error_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EngineError, match="ZeroDivisionError: boom"):
        await RemoteEngine.launch("remote_parts:breaks")
    assert "Traceback" in capfd.readouterr().err, "the log has the rest"


async def test_nothing_is_ready_before_it_has_started() -> None:
    engine = await RemoteEngine.launch("remote_parts:engine")
    assert engine.healthy and not engine.ready
    with pytest.raises(Overloaded):
        ask(engine, "a")
    await engine.stop()
    await engine.stop()
    assert not running(engine.pid)


# -- failing ---------------------------------------------------------------------------------------------------


async def test_SH_02_a_killed_engine_ends_every_request_at_once_and_health_is_red() -> None:
    async with remote(0.05) as engine:
        streams = [ask(engine, str(i), max_tokens=500, n=1 + i % 2) for i in range(6)]
        texts = [asyncio.create_task(text_of(g)) for g in streams]
        view = engine.kv_events()
        await anext(view)
        await until(lambda: all(log.tokens for g in streams for log in g.logs))
        os.kill(engine.pid, signal.SIGKILL)
        began = time.perf_counter()
        await asyncio.wait_for(asyncio.gather(*texts), 10)
        assert time.perf_counter() - began < 5
        for log in (log for g in streams for log in g.logs):
            assert (log.finish_reason, log.error_status) == ("error", 503) and "by signal 9" in (log.error or "")
            assert log.text == bytes(log.token_ids).decode() != ""
        assert not engine.healthy and not engine.ready and engine.num_requests == 0
        with pytest.raises(EngineDead):
            ask(engine, "new")
        assert await asyncio.wait_for(anext(view, None), 10) is None
        await engine.metrics.refresh()  # the last numbers stay, and nobody waits
        assert await engine.drained(60)


async def test_SH_02_an_engine_whose_loop_broke_tells_all_and_takes_its_process_along() -> None:
    engine = await RemoteEngine.launch("remote_parts:dies")
    await engine.start()
    streams = [ask(engine, str(i), max_tokens=500) for i in range(4)]
    await asyncio.wait_for(asyncio.gather(*(text_of(g) for g in streams)), 20)
    for log in (g.logs[0] for g in streams):
        assert (log.finish_reason, log.error_status) == ("error", 503) and "the loop itself" in (log.error or "")
        assert log.text == bytes(log.token_ids).decode() != ""
    await until(lambda: engine.dead is not None)
    assert "exit status 1" in str(engine.dead)
    await engine.stop()
    assert not running(engine.pid)


async def test_SH_02_a_stopped_engine_turns_health_red_and_its_requests_get_an_error() -> None:
    async with remote(0.02, stuck_after=0.6, give_up_after=1.5) as engine:
        stream = ask(engine, "a", max_tokens=700)
        await until(lambda: stream.logs[0].tokens)
        os.kill(engine.pid, signal.SIGSTOP)
        try:
            await until(lambda: not engine.healthy)
            assert not engine.ready and not stream.finished
            with pytest.raises(Overloaded):
                ask(engine, "b")
            began = time.perf_counter()
            await engine.metrics.refresh()
            assert time.perf_counter() - began < 5, "a scrape does not wait for it"
            await asyncio.wait_for(stream.wait(), 10)
            assert stream.logs[0].finish_reason == "error" and stream.logs[0].error_status == 503
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        await until(lambda: engine.ready and engine.num_requests == 0)
        told = stream.logs[0].token_ids
        after = ask(engine, "c")
        await after.wait()
        assert after.logs[0].token_ids == truth([0, 1, 2], 8), "it goes on when it can"
        assert stream.logs[0].token_ids == told


async def test_SH_02_a_stopped_engine_does_not_hold_the_end() -> None:
    async with remote(stuck_after=0.5) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        await until(lambda: not engine.healthy)
        await asyncio.wait_for(engine.stop(), 10)
        assert not running(engine.pid)


async def test_SH_06_who_comes_and_goes_does_not_fill_the_socket() -> None:
    async with remote(max_queue=20) as engine:
        os.kill(engine.pid, signal.SIGSTOP)
        refused = 0
        try:
            for i in range(500):
                try:
                    ask(engine, str(i), 100).cancel()
                except Overloaded:
                    refused += 1
        finally:
            os.kill(engine.pid, signal.SIGCONT)
        assert refused == 480
        await until(lambda: engine.num_requests == 0)
        await ask(engine, "last").wait()


async def test_SH_01_a_request_that_only_the_engine_refuses_is_alone_in_its_failure() -> None:
    async with remote(0.01) as engine:
        good = [ask(engine, str(i), max_tokens=40) for i in range(3)]
        engine._keys.clear()  # so that this side does not notice the name that is taken
        bad = ask(engine, "0", n=2)
        await bad.wait()
        assert [(log.finish_reason, log.error_status) for log in bad.logs] == [("error", 409)] * 2
        await asyncio.gather(*(g.wait() for g in good))
        assert all(g.logs[0].token_ids == truth([0, 1, 2], 40) for g in good)


async def test_SH_04_a_stop_ends_what_runs_with_an_error_and_leaves_no_process() -> None:
    async with remote(0.02) as engine:
        stream = ask(engine, "a", max_tokens=700)
        await until(lambda: stream.logs[0].tokens)
        assert not await engine.drained(0.05)
        await engine.stop()
        assert stream.logs[0].finish_reason == "error" and stream.logs[0].error_status == 503
        assert not running(engine.pid)
        with pytest.raises(Overloaded):
            ask(engine, "b")


async def test_SH_05_the_engine_hears_no_signals() -> None:
    async with remote() as engine:
        assert os.getpgid(engine.pid) != os.getpgid(0), "a Ctrl-C in the terminal does not reach it"
        for sig in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.pid, sig)
        await ask(engine, "a").wait()
        assert engine.ready


PARENT = """
import asyncio, os, signal
from chatsvc.engine.remote import RemoteEngine
async def main():
    engine = await RemoteEngine.launch("remote_parts:deaf", 0.01)
    await engine.start()
    {before}
    await asyncio.sleep(0.3)
    print(engine.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "before",
    ["pass", "os.kill(engine.pid, signal.SIGSTOP)", "call = asyncio.ensure_future(engine._call('metrics'))"],
    ids=["idle", "stopped", "deaf"],
)
def test_SH_04_no_orphan_when_the_parent_is_killed(before: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT.format(before=before)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert running(child)
        parent.kill()
        parent.wait()
        end = time.monotonic() + 20
        while running(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not running(child)
