"""``chatsvc bench perplexity``."""

from __future__ import annotations

from typing import Any

import click

from chatsvc.bench.perplexity import WINDOW, perplexity
from chatsvc.cli.options import given, options_of
from chatsvc.config import ServeConfig

# (--quantization, --kv-cache-dtype); the first is what the others are compared with.
WAYS = (
    *(("none", "float32"), ("none", "float16"), ("none", "bfloat16")),
    *(("int8", "float32"), ("int8", "float16"), ("int8", "bfloat16")),
)


@click.command("perplexity")
@click.option("--tokens", type=click.IntRange(min=2), default=20480, show_default=True)
@options_of(ServeConfig, only=("model", "dtype", "threads", "block_size", "attention_backend"))
def command(tokens: int, **values: Any) -> None:
    """What faster ways cost: how well the model predicts a text, exactly, with int8, with K and V in 16 bits."""
    config = ServeConfig.of(**given(values))
    click.echo(f"{config.model} on Python's documentation, windows of {WINDOW} tokens")
    click.echo("quantization  kv cache  perplexity   ratio  tokens  tokens/s")
    first = None
    for quantization, kept in WAYS:
        r = perplexity(config, quantization, tokens, kept)
        first = first or r.value
        rate = r.tokens / r.seconds
        click.echo(f"{r.quantization:12}  {kept:8}  {r.value:10.4f} {r.value / first:7.5f} {r.tokens:7} {rate:9.0f}")
