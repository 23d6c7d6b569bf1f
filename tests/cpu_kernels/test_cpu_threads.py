"""Threads that the system does not start are an error, and leave nothing behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kernels.cpu import build

pytestmark = [
    pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc"),
]

# In a process of its own: there is room for the stacks of some threads, not of all.
CODE = """
import resource, sys
from pathlib import Path
from kernels.cpu.library import Attention, Library, Model, Shape

library = Library(Path(sys.argv[1]))
threads = lambda: len(list(Path("/proc/self/task").iterdir()))
before = threads()
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + 256 * 2**20, resource.RLIM_INFINITY))
shape = Shape(vocab=8, hidden=8, layers=1, heads=1, kv_heads=1, dim=8, intermediate=8, eps=1e-5)
for make in (lambda n: Attention(library, n), lambda n: Model(library, shape, n)):
    try:
        make(4000)
    except MemoryError as error:
        print("refused:", error, threads() - before)
    made = make(2)
    print("made", threads() - before)
    del made
"""


def test_threads_that_cannot_be_started_are_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(build.ensure())], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.splitlines() == [
        "refused: no memory or no threads for the CPU attention kernels 0",
        "made 1",
        "refused: no memory or no threads for the CPU kernels 0",
        "made 1",
    ]
