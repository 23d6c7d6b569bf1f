"""The smallest memory limit of the process's cgroup and those above it counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chatsvc.config import usable_memory

MIB = 2**20
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("line", "limits", "want"),
    [
        ("0::/", {"memory.max": 300 * MIB}, 300 * MIB),
        ("0::/a.slice/b.service", {"a.slice/b.service/memory.max": 200 * MIB, "a.slice/memory.max": "max"}, 200 * MIB),
        ("0::/a.slice/b.service", {"a.slice/b.service/memory.max": "max", "a.slice/memory.max": 100 * MIB}, 100 * MIB),
        ("0::/a.slice/b.service", {"other/memory.max": MIB}, MACHINE),
        ("0::/docker/0123 of the host", {"memory.max": 50 * MIB}, 50 * MIB),
        ("0::/../outside", {"../outside/memory.max": MIB, "memory.max": 60 * MIB}, 60 * MIB),
        ("5:cpu,memory:/x", {"memory/x/memory.limit_in_bytes": 70 * MIB}, 70 * MIB),
        (
            "5:memory:/x/y",
            {"memory/x/memory.limit_in_bytes": 80 * MIB, "memory/memory.limit_in_bytes": 2**63},
            80 * MIB,
        ),
        ("5:cpu:/x", {"memory/x/memory.limit_in_bytes": MIB}, MACHINE),
        (None, {"memory.max": 90 * MIB}, 90 * MIB),
        ("0::/", {}, MACHINE),
    ],
)
def test_limits(tmp_path: Path, line: str | None, limits: dict[str, int | str], want: int) -> None:
    mounted, proc = tmp_path / "cgroup", tmp_path / "own"
    mounted.mkdir()
    if line is not None:
        proc.write_text(f"{line}\n1:name=systemd:/elsewhere\n")
    for name, limit in limits.items():
        file = mounted / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    assert usable_memory(proc, mounted) == want
