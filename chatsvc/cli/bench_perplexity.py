"""``chatsvc bench perplexity``."""

from __future__ import annotations

from typing import Any

import click

from chatsvc.bench.perplexity import WINDOW, perplexity
from chatsvc.cli.options import given, options_of
from chatsvc.config import ServeConfig


@click.command("perplexity")
@click.option("--tokens", type=click.IntRange(min=2), default=20480, show_default=True)
@options_of(ServeConfig, only=("model", "dtype", "threads", "block_size", "attention_backend"))
def command(tokens: int, **values: Any) -> None:
    """What int8 costs: how well the model predicts a text, exactly and with --quantization int8."""
    config = ServeConfig.of(**given(values))
    click.echo(f"{config.model} on Python's documentation, windows of {WINDOW} tokens")
    click.echo("quantization  perplexity   ratio  tokens  tokens/s")
    first = None
    for quantization in ("none", "int8"):
        r = perplexity(config, quantization, tokens)
        first = first or r.value
        rate = r.tokens / r.seconds
        click.echo(f"{r.quantization:12} {r.value:11.4f} {r.value / first:7.5f} {r.tokens:7} {rate:9.0f}")
