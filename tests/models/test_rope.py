"""Rotary scaling against transformers, also past the original length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CachedAttend, assert_close, hf_logits, load_float32, our_logits, save, tiny, token_ids
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from chatsvc.models.config import ModelConfig
from chatsvc.models.hf_config import parse_hf_config
from chatsvc.models.loader import load_config
from chatsvc.models.rotary import CHUNK, Rotary

CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 64},
    "llama3-implicit-original": LLAMA3,
    "yarn": {**YARN, "original_max_position_embeddings": 32},
    "yarn-mscale": {**YARN, "original_max_position_embeddings": 32, "mscale": 0.8, "mscale_all_dim": 1.1},
    "yarn-all": {
        **YARN,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
}


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_logits_past_the_original_length(tmp_path: Path, name: str, theta: float) -> None:
    scaling = {**SCALINGS[name], "rope_theta": theta}
    reference = tiny("llama", max_position_embeddings=128, head_dim=32, rope_parameters=scaling)
    model = load_float32(save(reference, tmp_path))
    ids = token_ids(400)
    assert_close(our_logits(model, ids), hf_logits(reference, ids))


@pytest.mark.parametrize("name", [*SCALINGS, "dynamic"])
def test_angles_far_out(name: str) -> None:
    """At positions 0, 1,000, 8,192 and 20,000 of an 8k model with Llama's real head size."""
    scaling = {**SCALINGS.get(name, {"rope_type": "dynamic", "factor": 2.0}), "rope_theta": 500000.0}
    if "original_max_position_embeddings" in scaling:
        scaling["original_max_position_embeddings"] = 2048
    settings = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 8192}
    settings |= {"vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "model_type": "llama"}
    config = parse_hf_config(settings | {"rope_parameters": scaling})
    del settings["model_type"]
    reference = LlamaRotaryEmbedding(LlamaConfig(**settings, rope_parameters=dict(scaling)))
    for position in (0, 1000, 8192, 20000):
        positions = torch.tensor([position])
        cos, sin = reference(torch.zeros(1), positions[None])
        ours_cos, ours_sin = Rotary(config, CPU).cos_sin(positions, torch.float32)
        torch.testing.assert_close(ours_cos[:, 0], cos[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours_sin[:, 0, 64:], sin[0, :, 64:], atol=1e-6, rtol=0)
        torch.testing.assert_close(ours_sin[:, 0, :64], -sin[0, :, :64], atol=1e-6, rtol=0)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}


@pytest.mark.parametrize("length", [40, 64, 65, 200])
def test_dynamic_in_one_piece(tmp_path: Path, length: int) -> None:
    """transformers takes the base from the whole length for every position: ``rope_lens`` says so."""
    reference = tiny("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)
    model = load_float32(save(reference, tmp_path))
    ids = token_ids(length)
    logits = our_logits(model, ids, rope_lens=torch.full((length,), length))
    assert_close(logits, hf_logits(reference, ids))


def test_dynamic_token_by_token(tmp_path: Path) -> None:
    """A prompt within the original length and tokens past it, cached keys untouched: as transformers generates."""
    reference = tiny("llama", max_position_embeddings=64, rope_parameters=DYNAMIC)
    model = load_float32(save(reference, tmp_path))
    ids = token_ids(90)
    cache, attend = None, CachedAttend()
    with torch.inference_mode():
        for start, end in [(0, 60), *((i, i + 1) for i in range(60, 90))]:
            theirs = reference(ids[None, start:end], cache=cache, use_cache=True)
            cache = theirs.past_key_values
            rows = torch.arange(end - start)
            ours = model.forward(ids[start:end], torch.arange(start, end), attend, rows)
            assert_close(ours, theirs.logits[0])


def test_dynamic_does_not_depend_on_neighbours_or_chunks(tmp_path: Path) -> None:
    model = load_float32(save(tiny("llama", max_position_embeddings=64, rope_parameters=DYNAMIC), tmp_path))
    ids = token_ids(90)
    whole, attend, parts = our_logits(model, ids), CachedAttend(), []
    with torch.inference_mode():
        for start in range(0, 90, 15):
            positions = torch.arange(start, start + 15)
            parts.append(model.forward(ids[start : start + 15], positions, attend, torch.arange(15)))
    assert_close(torch.cat(parts), whole)
    # The service stays where both ways of counting agree.
    assert model.shape.max_model_len == 64


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
@given(calls=st.lists(st.lists(st.integers(0, 12 * CHUNK), min_size=1, max_size=5), min_size=1, max_size=6))
@settings(max_examples=15, deadline=None)
def test_a_position_has_the_same_bits_however_the_table_grew(name: str, calls: list[list[int]]) -> None:
    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 1, "rope_parameters": SCALINGS[name]}
    config = parse_hf_config(raw)
    grown = Rotary(config, CPU)
    for index, positions in enumerate(calls):
        torch.set_num_threads(1 + index % 2)
        for ours, alone in zip(
            grown.cos_sin(torch.tensor(positions), torch.float32),
            zip(*(Rotary(config, CPU).cos_sin(torch.tensor([p]), torch.float32) for p in positions), strict=True),
            strict=True,
        ):
            assert torch.equal(ours, torch.cat(alone))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 50}},
            {"rope_parameters": {**YARN, "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 50}},
        ),
        (
            {"rope_scaling": {**LLAMA3}, "original_max_position_embeddings": 50},
            {"rope_parameters": {**LLAMA3, "rope_theta": 1e4, "original_max_position_embeddings": 50}},
        ),
    ],
)
def test_old_and_new_spelling_mean_the_same(tmp_path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    files = save(tiny("llama"), tmp_path)
    config_file = tmp_path / "config.json"
    raw = json.loads(config_file.read_text())
    del raw["rope_parameters"]
    configs: list[ModelConfig] = []
    for changes in (old, new):
        config_file.write_text(json.dumps(raw | changes))
        configs.append(load_config(files))
    assert configs[0] == configs[1]


def test_yarn_reaches_as_far_as_it_says() -> None:
    raw = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    raw |= {"num_attention_heads": 1, "max_position_embeddings": 1000}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert parse_hf_config(raw | {"rope_scaling": yarn}).max_model_len == 4000
    assert parse_hf_config(raw | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}).max_model_len == 1000
