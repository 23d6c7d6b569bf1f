"""The KV pool's pages are made before a step comes to them, in the background."""

from __future__ import annotations

import ctypes
import math
import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels.cpu import build
from kernels.cpu.library import Library, Model, Sequences, Shape

MIB = 2**20
# As in populate.h; a pool of LARGE blocks is the least that gets all of it.
FAR, PART = 256 * MIB, 16
LARGE = FAR // MIB * PART
HUGE = 2 * MIB
# A block is one MiB.
SHAPE = Shape(vocab=8, hidden=8, layers=1, heads=8, kv_heads=8, dim=128, intermediate=8, eps=1e-5)
BLOCK = 128
libc = ctypes.CDLL(None, use_errno=True)


pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(sys.platform != "linux", reason="mincore, madvise and /proc as Linux has them"),
]


class Pool:
    """A mapping of ``mapped`` MiB; ``blocks`` of it are the pool, from the byte ``first`` on."""

    def __init__(self, blocks: int, mapped: int, first: int = 0) -> None:
        self.memory = mmap.mmap(-1, mapped * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        size = (blocks, 1, 2, BLOCK, SHAPE.kv_heads, SHAPE.dim)
        self.blocks = self.bytes[first : first + math.prod(size) * 4].view(torch.float32).view(size)

    def resident(self) -> torch.Tensor:
        """Whether each page is there."""
        seen = torch.zeros(len(self.bytes) // mmap.PAGESIZE, dtype=torch.uint8)
        start, size = ctypes.c_void_p(self.bytes.data_ptr()), ctypes.c_size_t(len(self.bytes))
        assert libc.mincore(start, size, ctypes.c_void_p(seen.data_ptr())) == 0
        return seen.bool()

    def wait(self, first: int, last: int) -> None:
        """Until the pages of these bytes are there."""
        until(lambda: bool(self.resident()[at(first) : at(last)].all()))

    def settled(self) -> torch.Tensor:
        """The same, once nothing has come for a while."""
        pages = self.resident()
        for _ in range(200):
            time.sleep(0.3)
            before, pages = pages, self.resident()
            if torch.equal(before, pages):
                return pages
        raise AssertionError("pages do not cease to come")


def at(number: int) -> int:
    return number // mmap.PAGESIZE


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 250  # the machine may be busy
    while not true():
        assert time.monotonic() < end, "the pages did not come"
        time.sleep(0.01)


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def model() -> Model:
    made = Model(Library(build.ensure()), SHAPE, 2)
    heads = SHAPE.heads * SHAPE.dim
    for kind, n, k in (("qkv", 3 * heads, 8), ("o", 8, heads), ("gate_up", 16, 8), ("down", 8, 8)):
        made.linear(0, kind, torch.ones(n, k) / k, None)
    made.linear(0, "head", torch.eye(8), None)
    made.norms(0, torch.ones(8), torch.ones(8), None, None)
    made.finish(torch.ones(8), tied=True)
    return made


def step(model: Model, pool: torch.Tensor, *blocks: int) -> torch.Tensor:
    """A sequence that has these blocks computes its last token."""
    length = (len(blocks) - 1) * BLOCK + 1
    angles = torch.cat([torch.ones(length, SHAPE.dim // 2), torch.zeros(length, SHAPE.dim // 2)], dim=1)
    return model.forward(Sequences([1], [length], [blocks], [blocks[-1] * BLOCK]), [5], [length - 1], [0], angles, pool)


def test_pages_come_before_a_step_writes_there() -> None:
    pool, kernels = Pool(blocks=LARGE, mapped=LARGE), model()
    step(kernels, pool.blocks, 0)
    pool.wait(0, MIB + FAR)
    assert not pool.settled()[at(MIB + FAR + HUGE) :].any(), "more than was due"


def test_the_window_moves_with_the_highest_block() -> None:
    pool, kernels = Pool(blocks=LARGE, mapped=LARGE), model()
    step(kernels, pool.blocks, 1)
    first = 2 * MIB + FAR
    pool.wait(2 * MIB, first)
    # There is more than enough still: the thread is let sleep.
    step(kernels, pool.blocks, 50)
    assert not pool.settled()[at(first + HUGE) :].any()
    step(kernels, pool.blocks, 100, 3)
    second = 101 * MIB + FAR
    pool.wait(first, second)
    # What a step has passed is that step's.
    step(kernels, pool.blocks, 600)
    third = 601 * MIB + FAR
    pool.wait(601 * MIB, third)
    pages = pool.settled()
    assert not pages[at(second + HUGE) : at(600 * MIB - HUGE)].any() and not pages[at(third + HUGE) :].any()


def test_nothing_comes_behind_the_end_of_the_pool() -> None:
    pool, kernels = Pool(blocks=99, mapped=400), model()
    step(kernels, pool.blocks, 95)
    pool.wait(95 * MIB, 99 * MIB)
    assert not pool.settled()[at(99 * MIB + HUGE) :].any()


def test_another_pool_begins_anew() -> None:
    kernels = model()
    for _ in range(2):
        pool = Pool(blocks=LARGE, mapped=LARGE)
        step(kernels, pool.blocks, 0)
        pool.wait(0, MIB + FAR)


def test_a_pool_of_another_size_begins_anew() -> None:
    pool, kernels = Pool(blocks=LARGE, mapped=LARGE), model()
    for blocks in (64, 32):
        step(kernels, pool.blocks[:blocks], blocks - 3)
        pool.wait((blocks - 3) * MIB, blocks * MIB)
        assert not pool.settled()[at(blocks * MIB + HUGE) :].any()
        pool.memory.madvise(mmap.MADV_DONTNEED)  # as if other memory had come to this address


def test_contents_stay() -> None:
    pool, kernels = Pool(blocks=200, mapped=200), model()
    written = pool.blocks[2:].view(-1)[:: 32 * 1024]  # some pages are there, some are not
    want = torch.arange(len(written), dtype=torch.float32)
    written.copy_(want)
    page = pool.blocks[10]
    page.copy_(torch.arange(page.numel()).view(page.shape))
    before = pool.blocks.clone()
    step(kernels, pool.blocks, 1)
    pool.wait(2 * MIB, 14 * MIB)
    before[1] = pool.blocks[1]  # the step's own
    assert torch.equal(pool.blocks, before)


def test_a_pool_may_begin_anywhere() -> None:
    pool, kernels = Pool(blocks=64, mapped=100, first=MIB + 64), model()
    step(kernels, pool.blocks, 0)
    pool.wait(2 * MIB, 6 * MIB)


def test_a_small_pool_has_little_that_is_not_in_use() -> None:
    pool, kernels = Pool(blocks=160, mapped=160), model()
    step(kernels, pool.blocks, 0)
    pool.wait(0, MIB + 10 * MIB)
    assert not pool.settled()[at(11 * MIB + HUGE) :].any()


def test_a_pool_of_less_than_a_page_needs_no_thread() -> None:
    pool = torch.empty(1, 1, 2, 1, 8, 128, dtype=torch.bfloat16)
    assert pool.numel() * 2 <= mmap.PAGESIZE
    kernels, before = model(), threads()
    angles = torch.cat([torch.ones(1, 64), torch.zeros(1, 64)], dim=1)
    assert kernels.forward(Sequences([1], [1], [[0]], [0]), [5], [0], [0], angles, pool).isfinite().all()
    assert threads() == before


def test_pages_come_between_steps() -> None:
    """A prompt of 1,500 tokens takes long enough for hundreds of MiB, but none come before its step is over."""
    length = 12 * BLOCK
    angles = torch.cat([torch.ones(length, SHAPE.dim // 2), torch.zeros(length, SHAPE.dim // 2)], dim=1)
    blocks = list(range(12))
    sequences = Sequences([length], [length], [blocks], list(range(length)))

    def prompt(kernels: Model, pool: torch.Tensor, over: threading.Event) -> None:
        kernels.forward(sequences, [5] * length, list(range(length)), [length - 1], angles, pool)
        over.set()

    began = time.monotonic()
    prompt(model(), torch.zeros(12, 1, 2, BLOCK, SHAPE.kv_heads, SHAPE.dim), threading.Event())
    third = (time.monotonic() - began) / 3
    for _ in range(20):
        pool, kernels, over = Pool(blocks=LARGE, mapped=LARGE), model(), threading.Event()
        running = threading.Thread(target=prompt, args=(kernels, pool.blocks, over))
        running.start()
        time.sleep(third)
        pages = pool.resident()[at(12 * MIB + HUGE) :]
        soon_enough = not over.is_set()
        running.join()
        if soon_enough:
            assert not pages.any(), "pages come while a step runs"
            pool.wait(0, 12 * MIB + FAR)
            return
    raise AssertionError("the step is over before anybody can look")


def test_a_model_goes_while_pages_come() -> None:
    # It waits for one huge page at most: some of the others are missing (a fast machine may be done before).
    missing = False
    for _ in range(10):
        pool, kernels = Pool(blocks=LARGE, mapped=LARGE), model()
        step(kernels, pool.blocks, 0)
        held = [kernels]
        del kernels
        gone = threading.Thread(target=held.clear, daemon=True)
        gone.start()
        gone.join(60)
        assert not gone.is_alive(), "it waits for ever"
        pages = pool.resident()
        time.sleep(0.05)
        assert torch.equal(pool.resident(), pages), "pages come after the model has gone"
        missing = missing or not pages[: at(MIB + FAR)].all()
    assert missing


def test_a_model_goes_while_its_thread_sleeps() -> None:
    pool, kernels = Pool(blocks=4, mapped=4), model()
    step(kernels, pool.blocks, 0)
    pool.settled()
    held = [kernels]
    del kernels
    gone = threading.Thread(target=held.clear, daemon=True)
    gone.start()
    gone.join(60)
    assert not gone.is_alive()


def test_a_pool_goes_while_its_pages_come() -> None:
    kernels, want = model(), torch.tensor([])
    for i in range(5):
        pool = Pool(blocks=LARGE, mapped=LARGE)
        got = step(kernels, pool.blocks, 0)
        want = got if i == 0 else want
        del pool
        assert torch.equal(got, want)


# In a process of its own: there is room for what a step needs, and none for another thread's stack.
CODE = """
import resource, sys
from pathlib import Path
sys.path[:0] = sys.argv[1:]
import torch
from test_cpu_populate import Pool, model, step

pool, kernels = Pool(blocks=300, mapped=300), model()
want = step(kernels, torch.zeros_like(pool.blocks[:1]), 0)
del kernels
kernels = model()
threads = lambda: len(list(Path("/proc/self/task").iterdir()))
before = threads()
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 2**21, resource.RLIM_INFINITY))
for _ in range(3):
    assert torch.equal(step(kernels, pool.blocks, 0), want)
print(threads() - before)
"""


def test_a_thread_that_cannot_be_started_is_done_without() -> None:
    here = Path(__file__)
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(here.parent), str(here.parents[2])],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
