"""From scripted tokens to what readers see: ST-04, ST-05, ST-06, OA-04, and every cursor reads the same text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_harness import EOS, ByteTokenizer, Rig, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from chatsvc.engine.metrics import Metrics
from chatsvc.engine.output import Delta, Generation
from chatsvc.engine.publisher import Running
from chatsvc.scheduler.params import SamplingParams
from chatsvc.scheduler.plan import SampledToken
from chatsvc.scheduler.request import Request

WORDS = "👩‍👩‍👧 naïve 日本語 שלום e\u0301 end"


async def played(rig: Rig, tokens: bytes | list[int], **fields: Any) -> tuple[str, Any]:
    generation = rig.script(tokens, **fields)
    text = (await text_of(generation))[0]
    log = generation.logs[0]
    assert text == log.text and len(log.pieces) == len(log.tokens)
    return text, log


async def test_ST_04_characters_split_over_tokens_come_whole() -> None:
    async with Rig() as rig:
        generation = rig.script(WORDS.encode())
        pieces = [d.text async for news in generation.read() for d in news]
        assert "".join(pieces) == WORDS and not any("\ufffd" in p for p in pieces)


@pytest.mark.parametrize("cut", range(1, 9))
async def test_ST_05_a_cut_inside_a_character_is_one_replacement_at_the_end(cut: int) -> None:
    async with Rig() as rig:
        text, log = await played(rig, "a👩é".encode(), max_tokens=cut)
        assert text == "a👩é".encode()[:cut].decode("utf-8", "replace")
        assert log.finish_reason == ("length" if cut <= 7 else "stop") and len(log.tokens) == cut


async def test_ST_05_bytes_that_are_no_characters_do_not_stall() -> None:
    async with Rig() as rig:
        generation = rig.script([0x80] * 50)
        first = (await anext(generation.read()))[0]
        assert first.text == "\ufffd"
        assert await text_of(generation) == ["\ufffd" * 50]


@pytest.mark.parametrize(
    ("script", "stop", "text", "reason"),
    [
        ("quick brown fox", ("own fox",), "quick br", "stop"),
        ("quick brown foz jumps", ("own fox",), "quick brown foz jumps", "stop"),
        ("ABCDEFGHIJK", ("DEFGHIJ",), "ABC", "stop"),
        ("ABCDEFGHIJK", ("XYZ", "DE", "DEFG", "J"), "ABC", "stop"),
        ("aab", ("ab",), "a", "stop"),
        ("ends with a near miss: own fo", ("own fox",), "ends with a near miss: own fo", "stop"),
        ("👩‍👩‍👧 done", ("👩‍👧",), "👩‍", "stop"),
    ],
)
async def test_ST_06_stop_strings_over_token_borders(
    script: str, stop: tuple[str, ...], text: str, reason: str
) -> None:
    async with Rig() as rig:
        got, log = await played(rig, script.encode(), stop=stop)
        assert (got, log.finish_reason) == (text, reason)
        found = next((s for s in stop if script.startswith(text + s)), None)
        assert log.stop_reason == found
        if found is not None:
            assert len(log.tokens) == len((text + found).encode()), "generation ends with the stop string's last token"


async def test_ST_06_only_what_may_become_a_stop_string_is_held_back() -> None:
    async with Rig() as rig:
        generation = rig.script(b"quick brown foz", stop=("own fox",))
        await generation.wait()
        pieces = generation.logs[0].pieces
        assert pieces[:8] == list("quick br") and pieces[8:14] == [""] * 6 and pieces[14] == "own foz"


async def test_OA_04_ends_at_the_last_allowed_token() -> None:
    async with Rig() as rig:
        assert (await played(rig, b"abc", max_tokens=4))[1].finish_reason == "stop"
        assert (await played(rig, b"abc", max_tokens=3))[1].finish_reason == "length"
        text, log = await played(rig, b"abcd", stop=("cd",), max_tokens=4)
        assert (text, log.finish_reason, log.stop_reason) == ("ab", "stop", "cd")
        text, log = await played(rig, b"abcd", stop=("cd",), max_tokens=3)
        assert (text, log.finish_reason, log.stop_reason) == ("abc", "length", None)


async def test_stop_token_ids_end_without_showing_their_text() -> None:
    async with Rig() as rig:
        text, log = await played(rig, b"abcd", stop_token_ids=frozenset({ord("c")}), max_tokens=3)
        assert (text, log.finish_reason, log.stop_reason) == ("ab", "stop", ord("c"))
        assert log.token_ids == list(b"abc")
        text, log = await played(rig, [*b"a", EOS, *b"b"], ignore_eos=True)
        assert (text, log.finish_reason) == ("ab", "length"), "the last end token is ignored, too"


async def test_min_tokens_holds_off_every_kind_of_end() -> None:
    async with Rig() as rig:
        text, log = await played(rig, b"xxabxxab!", stop=("ab",), min_tokens=4)
        assert (text, log.stop_reason) == ("xxabxx", "ab")
        text, log = await played(rig, b"xabx", stop=("ab",), min_tokens=2)
        assert text == "xabx", "a stop string that began too early is none"
        text, log = await played(rig, [], min_tokens=3, max_tokens=10)
        assert len(log.tokens) == 4 and EOS not in log.token_ids[:3] and log.token_ids[3] == EOS
        text, log = await played(rig, b"cccc", min_tokens=2, stop_token_ids=frozenset({ord("c")}))
        assert len(log.tokens) == 3 and text == "dd", "a forbidden token gave way to its neighbour"


def running_of(stop: tuple[str, ...] = ("own fox",), n: int = 1) -> tuple[Running, Generation]:
    request = Request("r", [1, 2], SamplingParams(max_tokens=100, stop=stop, n=n), 0.0)
    request.make_sequences(0)
    generation = Generation("r", [1, 2], n, lambda: None, 0.0)
    return Running(request, generation, ByteTokenizer(), Metrics(lambda: None)), generation  # type: ignore[arg-type]


@given(
    script=st.text(alphabet="own fox👩é", max_size=30),
    bursts=st.lists(st.integers(1, 7), max_size=40),
    starts=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    patience=st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
@settings(max_examples=150, deadline=None)
def test_every_cursor_reads_the_rest_of_the_same_text(
    script: str, bursts: list[int], starts: list[int], patience: list[int]
) -> None:
    async def play() -> None:
        running, generation = running_of()
        choice, tokens = running.choices[0], [SampledToken(b) for b in script.encode()]
        got: list[list[Delta]] = [[] for _ in starts]

        async def read(i: int, start: int) -> None:
            async for news in generation.read([start]):
                assert [d.index for d in news] == [0]
                got[i] += news
                for _ in range(patience[i]):  # a slow reader
                    await asyncio.sleep(0)

        tasks: list[asyncio.Task[None]] = []
        todo = list(bursts)
        stop = None
        while tokens and stop is None:
            count = todo.pop() if todo else 1
            burst, tokens = tokens[:count], tokens[count:]
            stop = running.append(choice, burst, None, 0.0)
            generation.notify()
            while len(tasks) < len(starts) and starts[len(tasks)] <= len(choice.log.tokens):
                tasks.append(asyncio.create_task(read(len(tasks), starts[len(tasks)])))
            await asyncio.sleep(0)
        running.end(choice, "stop", stop=stop)
        generation.notify()
        while len(tasks) < len(starts):
            tasks.append(asyncio.create_task(read(len(tasks), min(starts[len(tasks)], len(choice.log.tokens)))))
        await asyncio.gather(*tasks)
        log = choice.log
        assert log.text == script.split("own fox")[0]
        for start, deltas in zip(starts, got, strict=True):
            start = min(start, len(log.tokens))
            assert "".join(d.text for d in deltas) == "".join(log.pieces[start:]) + log.tail
            assert [t for d in deltas for t in d.tokens] == log.tokens[start:]
            assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + ["stop"]
            assert deltas[-1].cursor == len(log.tokens)
        assert not generation._watchers

    asyncio.run(play())


async def test_readers_do_not_disturb_each_other() -> None:
    async with Rig(steps_in_flight=1) as rig:
        rig.executor.held = True
        generation = rig.script(b"abcdefgh")
        leaver, stayer = generation.read(), generation.read()
        sleeper = generation.read()

        async def step() -> None:
            await rig.until(lambda: rig.executor.pending)
            rig.executor.release()
            await rig.turn(5)

        first = asyncio.create_task(anext(sleeper))
        await step()
        assert [d.text for d in await first] == ["a"]
        assert [d.text for d in await anext(leaver)] == ["a"]
        await leaver.aclose()  # type: ignore[attr-defined]
        for _ in range(3):
            await step()
        waiting = asyncio.create_task(anext(stayer))
        assert [d.text for d in await waiting] == ["abcd"]
        cancelled = asyncio.create_task(anext(generation.read([4])))
        await rig.turn(2)
        cancelled.cancel()
        rig.executor.held = False
        rig.executor.release()
        await generation.wait()
        assert [d.text async for news in sleeper for d in news] == ["bcdefgh"], "a slow reader gets one delta"
        assert [d.text async for news in stayer for d in news] == ["efgh"]
        assert not generation._watchers


async def test_choices_look_for_stop_strings_each_for_itself() -> None:
    async with Rig() as rig:
        generation = rig.script(b"one two", n=3, stop=("e t",))
        assert await text_of(generation) == ["on"] * 3
        assert [log.stop_reason for log in generation.logs] == ["e t"] * 3


async def test_several_choices_are_read_by_their_own_cursors() -> None:
    async with Rig() as rig:
        generation = rig.generate(4, n=3, temperature=1.0, seed=3, max_tokens=6)
        await generation.wait()
        texts = await text_of(generation)
        assert len(set(texts)) == 3
        (news,) = [n async for n in generation.read([6, 2, 0])]
        assert [(d.index, d.text, d.cursor) for d in news] == [(0, "", 6), (1, texts[1][2:], 6), (2, texts[2], 6)]
