"""A rig on the simulated executor, with every invariant checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from chatsvc.bench.rig import Rig
from chatsvc.config import ServeConfig
from chatsvc.errors import ModelError
from chatsvc.modelfiles import resolve


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    try:
        resolve("smollm2-135m")
    except ModelError as e:
        pytest.skip(f"its tokenizer makes the prompts: {e}")
    rigs: list[Rig] = []

    def make(pool: int = 4096, **kw: Any) -> Rig:
        size = kw.get("block_size", 16)
        values = {"max_model_len": 2048, "max_num_seqs": 32, "simulated_step_ms": 25.0, "simulated_token_ms": 2.5, **kw}
        rigs.append(Rig(ServeConfig.of(executor="simulated", num_kv_blocks=pool // size, **values)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()
