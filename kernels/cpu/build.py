"""Compile the CPU kernels once per machine, compiler and source: ``python -m kernels.cpu.build``.

The library is plain C++ with a C interface: it needs a C++20 compiler and nothing of torch, so one build serves every
torch version. It is compiled for the processor at hand (``-march=native``), kept in the user's cache directory under a
name that says everything it depends on, and used only after it has passed a check of its own in another process: a
compiler that makes wrong or illegal code must cost speed, not answers.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
# No contraction: a multiplication and an addition are fused where the source says so and nowhere else, or two variants
# of a tile could differ in their last bit.
FLAGS = (
    "-O3",
    "-std=c++20",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-fPIC",
    "-pthread",
)
TIMEOUT = 300


class BuildError(Exception):
    """No library, and why; plain torch does the work then."""


def compiler() -> str | None:
    """The C++ compiler that would be used: ``$CXX``, or the first one of the usual names."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def built() -> Path | None:
    """The finished library of this source, compiler and machine, or None; compiles nothing."""
    path = _target(compiler())
    return path if path is not None and _whole(path) else None


def ensure(target: str = "native") -> Path:
    """The library, compiled and checked if it is not there yet, or damaged (about twenty seconds, once).

    Args:
        target: for ``-march``; anything but "native" is for tests.

    Raises:
        BuildError: no compiler, it failed, or what it made fails its check.
    """
    cxx = compiler()
    if cxx is None:
        raise BuildError("no C++ compiler found (c++, g++, clang++ or $CXX)")
    path = _target(cxx, target)
    assert path is not None
    if _whole(path):
        return path
    began = time.perf_counter()
    log.info("compiling the CPU kernels with %s, once for this machine (about 20 s)", cxx)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise BuildError(f"cannot write to {path.parent}: {e.strerror}") from e
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        fresh = Path(scratch) / path.name
        _compile(cxx, target, fresh)
        _check(fresh)
        library = fresh.read_bytes()
        fresh.write_bytes(library + _digest(library))
        # Two processes may build at once: both results are whole, and the last one stays.
        fresh.replace(path)
    log.info("CPU kernels ready after %.1f s: %s", time.perf_counter() - began, path)
    return path


def cache_dir() -> Path:
    """Where libraries are kept: below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "chatsvc-kernels"


def _target(cxx: str | None, target: str = "native") -> Path | None:
    if cxx is None:
        return None
    stat = os.stat(os.path.realpath(cxx))
    key = hashlib.sha256(repr((cxx, stat.st_size, stat.st_mtime_ns, FLAGS, target, _cpu())).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode())
        key.update(source.read_bytes())
    return cache_dir() / f"cpu-{key.hexdigest()[:20]}.so"


def _digest(library: bytes) -> bytes:
    return hashlib.sha256(library).digest()


def _whole(path: Path) -> bool:
    """Whether it is there as it was when it passed its check: its digest stands behind it, where no loader looks."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-32:] == _digest(data[:-32])


def works(cxx: str) -> bool:
    """Whether it is a compiler of C++20."""
    command = [cxx, "-std=c++20", "-x", "c++", "-E", "-P", "-"]
    try:
        done = subprocess.run(command, input="__cplusplus", capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() >= "202002L"


def _cpu() -> str:
    """What the compiler sees of the processor: a cache directory may be shared by different machines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("flags", "Features", "model name", "model", "stepping", "CPU part")
    lines = {line.split(":")[0].strip(): line for line in text.splitlines() if ":" in line}
    return repr([lines.get(name) for name in wanted])


def _compile(cxx: str, target: str, out: Path) -> None:
    """Each file by itself, as many at a time as there are cores, then one library of them."""
    march = f"-mcpu={target}" if platform.machine() in ("aarch64", "arm64") else f"-march={target}"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [out.with_name(f"{source.stem}.o") for source in sources]
    commands = [
        [cxx, *FLAGS, march, "-c", "-o", str(to), str(source)] for source, to in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for _ in threads.map(_run, commands):
            pass
    _run([cxx, *FLAGS, march, "-shared", "-o", str(out), *map(str, objects)])


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"{command[0]} did not finish: {e}") from e
    if done.returncode:
        raise BuildError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _check(path: Path) -> None:
    command = [sys.executable, "-m", "kernels.cpu.check", str(path)]
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, cwd=root)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"the check of the compiled kernels did not finish: {e}") from e
    if done.returncode:
        raise BuildError(f"the compiled kernels fail their check: {(done.stderr or done.stdout).strip()[-2000:]}")


def main() -> int:
    """For the install step: never fails it, says what will be used."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    try:
        ensure()
    except BuildError as e:
        print(f"CPU kernels are not available, plain torch will be used: {e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
