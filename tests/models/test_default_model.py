"""The default model against transformers' own reading of the same GGUF file, and what loading leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import hf_logits, load_float32, our_logits
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from chatsvc.modelfiles import DEFAULT_MODEL, resolve
from chatsvc.models.hf_config import parse_hf_config

# "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\nGravity is a force that ..." in the model's ids
CHAT = [1, 4093, 198, 1780, 314, 14398, 47, 2, 198, 1, 520, 9531, 198, 23835, 2289, 314, 253, 3104, 338, 26303, 2988]


@pytest.fixture(scope="module")
def path() -> Path:
    return resolve(DEFAULT_MODEL).path


@torch.inference_mode()
def test_weights_and_logits_equal_transformers(path: Path) -> None:
    # The checkpoint's published configuration; transformers' reading of the metadata has lost rms_norm_eps at times.
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    with no_init_weights():
        reference = LlamaForCausalLM(config).eval()
    state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=reference)["tensors"]
    reference.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})

    model = load_float32(resolve(DEFAULT_MODEL))
    assert model.config == parse_hf_config(config.to_dict() | {"_name_or_path": ""})
    assert model.weights.lm_head is model.weights.embed
    for index, layer in enumerate(model.weights.layers):
        theirs = reference.model.layers[index]
        attention, mlp = theirs.self_attn, theirs.mlp
        qkv = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
        assert torch.equal(layer.qkv.weight, qkv)
        assert torch.equal(layer.o.weight, attention.o_proj.weight)
        assert torch.equal(layer.gate_up.weight, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
        assert torch.equal(layer.down.weight, mlp.down_proj.weight)
        assert torch.equal(layer.input_norm, theirs.input_layernorm.weight)
        assert torch.equal(layer.post_norm, theirs.post_attention_layernorm.weight)
    assert torch.equal(model.weights.embed, reference.model.embed_tokens.weight)
    assert torch.equal(model.weights.norm, reference.model.norm.weight)

    random = torch.randint(0, 49152, (80,), generator=torch.Generator().manual_seed(3))
    for ids in (torch.tensor(CHAT), random):
        ours, theirs = our_logits(model, ids), hf_logits(reference, ids)
        # Logits reach 35: this is a few units in the last place of float32.
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-5)
        sure = theirs.topk(2).values.diff().abs().squeeze(1) > 5e-4
        assert torch.equal(ours.argmax(-1)[sure], theirs.argmax(-1)[sure])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_keeps_one_copy_and_no_mapping(path: Path) -> None:
    """In a process of its own: the peak belongs to the process."""
    script = """
import json, resource, sys
from pathlib import Path
import torch
from chatsvc.modelfiles import ModelFiles
from chatsvc.models.loader import load_model
torch.set_num_threads(1)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
model = load_model(ModelFiles(Path(sys.argv[1]), "gguf", "x"), dtype=torch.float32, device="cpu")
weights = sum(t.numel() * 4 for layer in model.weights.layers for t in (
    layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight)) + model.weights.embed.numel() * 4
print(json.dumps({"grown": peak() - before, "weights": weights, "maps": Path("/proc/self/maps").read_text()}))
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert result["weights"] > 500e6
    assert result["grown"] < result["weights"] + 60e6
    assert path.name not in result["maps"]
