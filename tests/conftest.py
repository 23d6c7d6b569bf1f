"""Shared by all tests."""

from __future__ import annotations

import os
from collections import Counter

import pytest

# Triton reads it at import: its kernels run in the interpreter on machines without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    # Each worker, and every server that it starts, takes its share of the cores: two pools of threads that wait for
    # each other on the same cores cost several times what they do. Torch reads it at import.
    _share = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first: workers take whole files, and the last should not be a long one."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
