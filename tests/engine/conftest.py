"""Shared by the tests of chatsvc.engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tiny_llama import Tiny, make


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: a thread pool only costs, above all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return make(tmp_path_factory.mktemp("tiny"))
