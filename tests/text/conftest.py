from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from chatsvc.modelfiles import DEFAULT_MODEL, ModelFiles, resolve
from chatsvc.text.template import ChatTemplate, load_template
from chatsvc.text.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="session")
def default_files() -> ModelFiles:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def smollm(default_files: ModelFiles) -> Tokenizer:
    return load_tokenizer(default_files)


@pytest.fixture(scope="session")
def smollm_template(default_files: ModelFiles, smollm: Tokenizer) -> ChatTemplate:
    template = load_template(default_files, smollm)
    assert template is not None
    return template


@pytest.fixture(scope="session")
def hf_smollm(default_files: ModelFiles) -> Any:
    """transformers' own tokenizer of the same file, cut at digits as SmolLM2's tokenizer.json does (and llama.cpp)."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(str(default_files.path.parent), gguf_file=default_files.path.name)
    # The conversion from GGUF forgets this step; it matters for numerals outside ASCII only.
    hf._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return hf


@pytest.fixture(scope="session")
def hf_tokenizer() -> Callable[[Any], Any]:
    from transformers import AutoTokenizer

    return lambda path: AutoTokenizer.from_pretrained(str(path))
