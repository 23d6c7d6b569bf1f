"""Known fields that would change the answer and are not offered: refused by name, never swallowed.

Each name has the values that ask for nothing ("neutral"); null always does. A name that is in neither this table nor
the schema is a vendor's hint and is ignored (``metadata``, ``service_tier``, ``prompt_cache_key``, ``prediction`` ...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chatsvc.errors import InvalidRequest

_NO_LIST: tuple[Any, ...] = ([], {})
_OFF: tuple[Any, ...] = (False,)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "response_format": ({"type": "text"},),
    "tools": _NO_LIST,
    "tool_choice": ("none", "auto"),
    "functions": _NO_LIST,
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"], []),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "store": _OFF,
    "moderation": (),
    # OpenAI, plain completions
    "echo": _OFF,
    "suffix": ("",),
    # other servers'
    "prompt_logprobs": _OFF,
    "logits_processors": _NO_LIST,
    "logit_processors": _NO_LIST,
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "structured_outputs": _NO_LIST,
    "json_schema": (),
    "grammar": ("",),
    "regex": (),
    "ebnf": (),
    "bad_words": _NO_LIST,
    "allowed_token_ids": _NO_LIST,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "chat_template": (),
    "chat_template_kwargs": _NO_LIST,
    "documents": _NO_LIST,
    "return_tokens_as_token_ids": _OFF,
    "return_token_ids": _OFF,
    "typical_p": (1, 1.0),
    "top_a": (0, 0.0),
    "tfs": (1, 1.0),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "no_repeat_ngram_size": (0,),
    "min_new_tokens": (0,),
    "max_new_tokens": (),
    "lora_path": (),
    "adapter": ("",),
}


def refuse_unsupported(extra: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]] = NEUTRAL) -> None:
    """Raise for the first field of ``extra`` that asks for something not offered.

    Args:
        extra: the body's fields that the schema does not know.
        neutral: the table of fields.

    Raises:
        InvalidRequest: naming the field.
    """
    for name, value in (extra or {}).items():
        if value is None:
            continue
        if name in neutral and not any(type(value) is type(v) and value == v for v in neutral[name]):
            raise InvalidRequest(
                f"{name}: this is not supported {'by this server' if neutral is NEUTRAL else 'here'}",
                param=name,
                code="unsupported_parameter",
            )
