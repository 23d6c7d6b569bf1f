"""``config.json`` of transformers 4 and 5 -> :class:`ModelConfig`.

A key is read here, or is known to change no logit, or is switched off (null, false, empty); anything else is refused
by its name. Unknown keys are on the refused side: a field nobody here has heard of is how a new variant of an
architecture looks, and serving it as a plain Llama would give plausible nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from chatsvc.errors import ModelError
from chatsvc.models.config import ModelConfig, RopeScaling, yarn_attention_factor
from chatsvc.models.hf_keys import HANDLED, HARMLESS, NEUTRAL, ROPE_KEYS


@dataclass(frozen=True, slots=True)
class _Family:
    """What transformers takes for keys that a config.json of this ``model_type`` leaves out."""

    architecture: str
    max_position_embeddings: int
    num_kv_heads: int | None
    head_dim: int | None = None
    sliding_window: int | None = None


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", 2048, None),
    "mistral": _Family("MistralForCausalLM", 131072, 8, sliding_window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", 32768, 32),
    "qwen3": _Family("Qwen3ForCausalLM", 32768, 32, head_dim=128),
}


def parse_hf_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json.

    Raises:
        ModelError: naming the field that is missing, has an impossible value, or asks for something that is not
            implemented.
    """
    family = _family(raw)
    model_type = raw["model_type"]
    _refuse_unknown(raw)
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ModelError(f"hidden_act {act!r} is not supported, only 'silu'")
    hidden, heads = _integer(raw, "hidden_size"), _integer(raw, "num_attention_heads")
    attention_bias = _flag(raw, "attention_bias")
    if attention_bias and model_type not in ("llama", "qwen3"):
        raise ModelError(f"attention_bias is not a field of {model_type!r}: transformers would ignore it")
    if _flag(raw, "mlp_bias") and model_type != "llama":
        raise ModelError(f"mlp_bias is not a field of {model_type!r}: transformers would ignore it")
    # null means one for each query head, a missing key means the default of transformers' class.
    kv_heads = heads if "num_key_value_heads" in raw else family.num_kv_heads or heads
    context = _integer(raw, "max_position_embeddings", family.max_position_embeddings)
    theta, scaling = _rope(raw, context)
    config = ModelConfig(
        architecture=model_type,
        vocab_size=_integer(raw, "vocab_size"),
        hidden_size=hidden,
        num_layers=_integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(raw, "num_key_value_heads", kv_heads),
        head_dim=_integer(raw, "head_dim", family.head_dim or hidden // max(heads, 1)),
        intermediate_size=_integer(raw, "intermediate_size"),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_position_embeddings=context,
        rope_scaling=scaling,
        tie_word_embeddings=_flag(raw, "tie_word_embeddings"),
        qkv_bias=attention_bias or model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=_flag(raw, "mlp_bias"),
        qk_norm=model_type == "qwen3",
    )
    _refuse_window(raw, family, config)
    return config


def _family(raw: Mapping[str, Any]) -> _Family:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ModelError(f"model_type {model_type!r} is not supported; supported are {', '.join(_FAMILIES)}")
    family = _FAMILIES[model_type]
    architectures = raw.get("architectures")
    if architectures and architectures != [family.architecture]:
        raise ModelError(
            f"architectures {architectures!r} is not supported for {model_type}, only {family.architecture}"
        )
    return family


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    refused = []
    for key, value in raw.items():
        off = value is None or value is False or value in ("", [], {})
        neutral = key in NEUTRAL and not isinstance(value, bool) and value == NEUTRAL[key]
        if not (off or neutral or key in HANDLED or key in HARMLESS):
            refused.append(f"{key} = {str(value)[:60]}")
    if refused:
        raise ModelError(f"config.json asks for what is not supported: {'; '.join(refused)}")


def _refuse_window(raw: Mapping[str, Any], family: _Family, config: ModelConfig) -> None:
    """A window as wide as the context hides nothing; a smaller one that any layer uses is not implemented."""
    layer_types = raw.get("layer_types") or []
    if strange := set(layer_types) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"layer_types {', '.join(sorted(map(str, strange)))} is not supported")
    if config.architecture.startswith("qwen"):
        window = _integer(raw, "sliding_window", 4096) if _flag(raw, "use_sliding_window") else 0
        full = _integer(raw, "max_window_layers", 28)
        used = "sliding_attention" in layer_types or (not layer_types and full < config.num_layers)
    else:
        window = _integer(raw, "sliding_window", 0 if "sliding_window" in raw else family.sliding_window or 0)
        used = True
    if used and 0 < window < config.max_model_len:
        raise ModelError(
            f"sliding_window {window} is smaller than the context of {config.max_model_len} tokens: not supported"
        )


def _rope(raw: Mapping[str, Any], context: int) -> tuple[float, RopeScaling]:
    """theta and scaling: both in transformers 5's ``rope_parameters``, or 4's ``rope_theta`` and ``rope_scaling``."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelError(f"rope_parameters is {rope!r}, expected an object")
    if unknown := sorted(k for k, v in rope.items() if k not in ROPE_KEYS and v is not None):
        raise ModelError(f"rope_parameters.{unknown[0]} is not supported")
    for source, name in ((rope, "rope_parameters.partial_rotary_factor"), (raw, "partial_rotary_factor")):
        if _number(source, "partial_rotary_factor", 1.0) != 1.0:
            raise ModelError(f"{name} {source['partial_rotary_factor']} is not supported, only 1.0")
    theta = _number(rope, "rope_theta", _number(raw, "rope_theta", 10000.0))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, RopeScaling()
    if kind == "linear":
        return theta, RopeScaling("linear", _factor(rope))
    if kind == "dynamic":
        return theta, RopeScaling("dynamic", _factor(rope))
    outer = raw.get("original_max_position_embeddings")
    original = _integer(raw, "original_max_position_embeddings", 0)
    if outer is None:
        original = _integer(rope, "original_max_position_embeddings", context)
    if original <= 0:
        raise ModelError(f"original_max_position_embeddings must be positive, not {original}")
    if kind == "llama3":
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        if not 0 < low < high:
            raise ModelError(f"rope_parameters: low_freq_factor {low} and high_freq_factor {high} must ascend")
        return theta, RopeScaling("llama3", _factor(rope), original, low_freq_factor=low, high_freq_factor=high)
    if kind == "yarn":
        return theta, _yarn(rope, original, context)
    raise ModelError(f"rope_type {kind!r} is not supported; supported are default, linear, dynamic, llama3, yarn")


def _yarn(rope: Mapping[str, Any], original: int, context: int) -> RopeScaling:
    factor = context / original if rope.get("factor") is None else _factor(rope)
    mscale, all_dim = _number(rope, "mscale", 0.0), _number(rope, "mscale_all_dim", 0.0)
    if mscale and all_dim:
        attention = yarn_attention_factor(factor, mscale) / yarn_attention_factor(factor, all_dim)
    else:
        attention = yarn_attention_factor(factor)
    truncate = rope.get("truncate", True)
    return RopeScaling(
        "yarn",
        factor,
        original,
        attention_factor=_number(rope, "attention_factor", attention),
        beta_fast=_number(rope, "beta_fast", 0.0) or 32.0,
        beta_slow=_number(rope, "beta_slow", 0.0) or 1.0,
        truncate=bool(truncate),
    )


def _factor(rope: Mapping[str, Any]) -> float:
    factor = _number(rope, "factor")
    if factor < 1:
        raise ModelError(f"rope_parameters.factor must be at least 1, not {factor}")
    return factor


def _integer(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, expected a whole number")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{key} is {value!r}, expected a number")
    return float(value)


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, expected true or false")
    return value
