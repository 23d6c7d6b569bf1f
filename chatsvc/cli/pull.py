"""``chatsvc pull``."""

from __future__ import annotations

import click

from chatsvc.modelfiles import DEFAULT_MODEL, pull


@click.command("pull")
@click.argument("model", default=DEFAULT_MODEL, envvar="CHATSVC_MODEL")
@click.option("--progress/--no-progress", default=True, help="show a progress bar")
def command(model: str, progress: bool) -> None:
    """Fetch MODEL (the default model, or a Hub id) unless it is already here; prints where it is."""
    files = pull(model, progress=progress)
    click.echo(f"{files.name}: {files.path}")
