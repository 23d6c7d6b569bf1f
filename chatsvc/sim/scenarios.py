"""The scenarios of ``docs/paging.md``.

``llama-2-7b`` and ``llama-3-70b`` were fixed before the first run. ``opt-13b`` is the PagedAttention paper's own
smallest machine, added afterwards to see how much of a difference to the paper is the machine's.
"""

from __future__ import annotations

from chatsvc.sim.cost import Scenario
from chatsvc.sim.hardware import A100_40GB, A100_80GB, H100_80GB
from chatsvc.sim.models import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, OPT_13B

SCENARIOS = {
    s.name: s
    for s in (
        Scenario("llama-2-7b", LLAMA_2_7B, A100_80GB),
        Scenario("llama-3-70b", LLAMA_3_70B, H100_80GB, tp=4),
        Scenario("llama-3-8b", LLAMA_3_8B, A100_80GB),
        Scenario("opt-13b", OPT_13B, A100_40GB),
    )
}
# Everything below holds for every scenario and mode.
BLOCK_SIZE = 16
MAX_NUM_SEQS = 512
TOKENS_PER_STEP = 2048
