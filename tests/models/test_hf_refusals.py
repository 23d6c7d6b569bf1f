"""What cannot be served from a directory is refused, and the message names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import assert_close, hf_logits, load_float32, our_logits, save, tiny, token_ids
from transformers import AutoModelForCausalLM

from chatsvc.errors import ModelError
from chatsvc.models.loader import load_config


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("llama", {"model_type": "gemma2"}, "model_type 'gemma2'"),
        ("llama", {"model_type": None}, "model_type"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ("mistral", {"sliding_window": 32}, "sliding_window 32"),
        ("mistral", {"sliding_window": "absent", "max_position_embeddings": 8192}, "sliding_window 4096"),
        ("llama", {"sliding_window": 32}, "sliding_window 32"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2, "layer_types": []},
            "window 9",
        ),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 3},
            "window 8",
        ),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "linear_attention"),
        ("llama", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama", {"num_local_experts": 8}, "num_local_experts"),
        ("qwen3", {"num_experts": 16, "num_experts_per_tok": 2}, "num_experts = 16; num_experts_per_tok = 2"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier"),
        ("llama", {"embedding_multiplier": 12.0}, "embedding_multiplier"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier"),
        ("llama", {"logits_scaling": 8.0}, "logits_scaling"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ("llama", {"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map"),
        ("llama", {"a_field_of_tomorrow": 3}, "a_field_of_tomorrow"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ("llama", {"rope_scaling": {"rope_type": "su", "short_factor": [1.0]}}, "short_factor"),
        ("llama", {"rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "mrope_section"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_size": "absent"}, "hidden_size is missing"),
        ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
        ("llama", {"num_hidden_layers": 0}, "num_layers"),
        ("llama", {"num_key_value_heads": 3}, "num_kv_heads 3"),
        ("llama", {"head_dim": 15}, "head_dim 15"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_config_fields(tmp_path: Path, family: str, changes: dict[str, Any], named: str) -> None:
    files = save(tiny(family), tmp_path)
    load_config(files)
    change_config(tmp_path, changes)
    with pytest.raises(ModelError, match=named):
        load_config(files)


def test_fields_that_are_off_or_harmless(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path)
    before = load_config(files)
    change_config(
        tmp_path,
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "a_field_of_tomorrow": None,
            "num_experts": 0,
            "residual_multiplier": 1.0,
            "pretraining_tp": 1,
            "transformers.js_config": {"kv_cache_dtype": "x"},
            "attention_dropout": 0.1,
            "temperature": 0.6,
            "sliding_window": 4096,
            "quantization_config": None,
        },
    )
    assert load_config(files) == before


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
def test_config_that_is_no_object(tmp_path: Path, content: bytes) -> None:
    files = save(tiny("llama"), tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(files)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(files)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "same", "other", "alone"])
def test_output_layer_in_the_file_and_in_the_configuration(tmp_path: Path, tied: bool, head: str) -> None:
    """As transformers 5 loads it; what it would fill with random numbers is refused."""
    files = save(tiny("llama"), tmp_path)
    change_config(tmp_path, {"tie_word_embeddings": tied})
    tensors = load_file(tmp_path / "model.safetensors")
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "same":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    elif head == "alone":
        del tensors["model.embed_tokens.weight"]
    rewrite(tmp_path, tensors)
    if not tied and head in ("absent", "alone"):
        with pytest.raises(ModelError, match=r"lm_head\.weight|model\.embed_tokens\.weight"):
            load_float32(files)
        return
    model = load_float32(files)
    assert (model.weights.lm_head is model.weights.embed) == (tied and head != "other")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_close(our_logits(model, token_ids(30)), hf_logits(reference, token_ids(30)))


def test_missing_extra_and_misshapen_tensors_are_all_named(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.sinks"] = torch.ones(4)
    tensors["model.norm.weight"] = torch.ones(63)
    rewrite(tmp_path, tensors)
    with pytest.raises(ModelError) as caught:
        load_float32(files)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight" in message
    assert "unexpected: model.layers.0.self_attn.sinks" in message
    assert "model.norm.weight is [63], expected [64]" in message


def test_old_frequency_buffers_are_ignored(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    assert_close(our_logits(load_float32(files), token_ids(9)), hf_logits(tiny("llama"), token_ids(9)))


def test_wrong_dtype_is_named(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite(tmp_path, tensors | {name: tensors[name].to(torch.int8)})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight has dtype I8"):
        load_float32(files)


def test_shards(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path, max_shard_size="60KB")
    index_file = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shards = sorted(set(index["weight_map"].values()))
    load_float32(files)

    # A tensor that is in two shards.
    first, second = (load_file(tmp_path / shard) for shard in shards[:2])
    name = next(iter(first))
    save_file(second | {name: first[name]}, tmp_path / shards[1])
    with pytest.raises(ModelError, match=f"tensor {name} is in both {shards[0]} and {shards[1]}"):
        load_float32(files)
    save_file(second, tmp_path / shards[1])

    # An index that names a tensor its file does not have, or a file outside the directory.
    for weight_map, named in (
        (index["weight_map"] | {name: shards[1]}, f"{name} is not in {shards[1]}"),
        (index["weight_map"] | {name: "../" + shards[0]}, "not a file name"),
        ([], "weight_map"),
    ):
        index_file.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=named):
            load_float32(files)

    # A shard that is gone, and then the index as well.
    index_file.write_text(json.dumps(index))
    (tmp_path / shards[1]).unlink()
    with pytest.raises(ModelError, match=f"{shards[1]} is missing"):
        load_float32(files)
    index_file.unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors"):
        load_float32(files)


@pytest.mark.parametrize("keep", [0, 5, 8, 200, -300])
def test_cut_files_are_refused(tmp_path: Path, keep: int) -> None:
    files = save(tiny("llama"), tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_float32(files)


def test_damaged_table(tmp_path: Path) -> None:
    files = save(tiny("llama"), tmp_path)
    good = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(good[:8], "little")
    table, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    name = "model.norm.weight"
    begin, end = table[name]["data_offsets"]
    for entry in ({"dtype": "F32"}, None, table[name] | {"data_offsets": [begin, end + 4]}, table[name] | {"shape": 3}):
        raw = json.dumps(table | {name: entry}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
        with pytest.raises(ModelError, match=r"model\.norm\.weight"):
            load_float32(files)
    twice = (json.dumps(table)[:-1] + ', "model.norm.weight": ' + json.dumps(table[name]) + "}").encode()
    (tmp_path / "model.safetensors").write_bytes(len(twice).to_bytes(8, "little") + twice + data)
    with pytest.raises(ModelError, match=r"twice in one file: .*model\.norm\.weight"):
        load_float32(files)


def change_config(directory: Path, changes: dict[str, Any]) -> None:
    """Set keys of config.json; "absent" removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
