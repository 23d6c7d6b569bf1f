"""The keys of a config.json, by what they may do to a logit."""

from __future__ import annotations

from collections.abc import Mapping

# fmt: off
# Read by hf_config.
HANDLED = frozenset({
    "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "rope_theta",
    "rope_scaling", "rope_parameters", "original_max_position_embeddings", "partial_rotary_factor",
    "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
})

# Change no logit.
HARMLESS = frozenset({
    # where the file comes from, how it was trained, how it is stored
    "_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "transformers.js_config",
    "torch_dtype", "dtype", "initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop",
    "embd_pdrop", "pretraining_tp", "gradient_checkpointing", "use_cache", "torchscript", "use_bfloat16",
    "tf_legacy_loss", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "is_llama_config", "unsloth_version", "unsloth_fixed", "model_max_length", "max_sequence_length",
    "tokenizer_model_max_length", "tokenizer_class", "finetuning_task", "task_specific_params",
    "problem_type", "id2label", "label2id", "num_labels", "output_attentions", "output_hidden_states",
    "return_dict", "is_decoder", "chunk_size_feed_forward", "prefix",
    # tokens and generation: the tokenizer and the sampler have their own files
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "decoder_start_token_id",
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
    "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty",
    "suppress_tokens", "begin_suppress_tokens",
})

# Inside rope_parameters or rope_scaling; a type ignores the keys of the others, as in transformers.
ROPE_KEYS = frozenset({
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor", "finetuned",
})

# fmt: on
# Fields of related architectures, at the value that means nothing.
NEUTRAL: Mapping[str, float] = {
    "num_experts": 0,
    "num_local_experts": 0,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
}
