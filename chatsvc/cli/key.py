"""``chatsvc key``: make an API key, and look at the file of those there are."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click

from chatsvc.api.keys import AREAS, KeyEntry, KeySet, new_key, parse_entry, read_keys
from chatsvc.errors import ConfigError

_file = click.option(
    "--file",
    "path",
    envvar="CHATSVC_API_KEY_FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="the file that serve reads with --api-key-file",
)
_count = click.IntRange(1)


@click.group("key")
def command() -> None:
    """API keys: who may use the server, and how much."""


@command.command("new")
@click.argument("name")
@_file
@click.option("--tenant", help="whose sessions and cached prefixes it sees [its own]")
@click.option("--allow", multiple=True, type=click.Choice(AREAS), help="one or several [all]")
@click.option("--requests-per-minute", type=_count, help="answers it may ask for [no limit]")
@click.option("--tokens-per-minute", type=_count, help="of prompts and answers together [no limit]")
@click.option("--max-concurrent", type=_count, help="requests that run at a time [no limit]")
def new(
    name: str,
    path: Path,
    tenant: str | None,
    allow: tuple[str, ...],
    requests_per_minute: int | None,
    tokens_per_minute: int | None,
    max_concurrent: int | None,
) -> None:
    """Make a key, add its digest to the file, and print the key: it stands nowhere else.

    A running server sees the change within some seconds.
    """
    key, digest = new_key()
    given = {
        "name": name,
        "sha256": digest,
        "tenant": tenant,
        "allow": list(allow) or None,
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "max_concurrent": max_concurrent,
    }
    entry = parse_entry({k: v for k, v in given.items() if v is not None})
    there = () if _says_nothing(path) else read_keys(path).keys
    if any(k.name == name for k in there):
        raise ConfigError(f"{path}: there is a key with the name {name}; delete its [[key]] first")
    _append(path, "".join(f"{line}\n" for line in toml_of(entry)))
    click.echo(key)
    click.echo(f"{name} is in {path}. The key is shown this once.", err=True)


@command.command("list")
@_file
def show(path: Path) -> None:
    """Show the keys of the file (there are no secrets in it), or what is wrong with it."""
    for line in table(read_keys(path)):
        click.echo(line)


def toml_of(entry: KeyEntry) -> Iterator[str]:
    """Its ``[[key]]``. What JSON writes for these values is TOML, too."""
    yield "[[key]]"
    for name, value in entry.model_dump(exclude_none=True).items():
        yield f"{name} = {json.dumps(value)}"
    yield ""


def _says_nothing(path: Path) -> bool:
    """There is no such file, or nothing but comments in it."""
    try:
        return not tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return True
    except (OSError, ValueError):  # read_keys says what is wrong
        return False


def _append(path: Path, text: str) -> None:
    """One write; a new file is for its owner only."""
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out:
            if out.tell() and not path.read_bytes().endswith(b"\n"):
                text = "\n" + text
            out.write(text.encode())
    except OSError as e:
        raise ConfigError(f"{path}: {e.strerror}") from None


def table(keys: KeySet) -> Iterator[str]:
    """One line for each key."""
    rows: list[tuple[str, ...]] = [("name", "tenant", "may", "requests/min", "tokens/min", "at a time")]
    for key in keys.keys:
        limits = key.limits
        counts = (limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrent)
        may = "all" if key.unlimited else ",".join(sorted(key.allow))
        tenant = "(its own)" if key.tenant.startswith("key:") else key.tenant or "(of the time without keys)"
        rows.append((key.name, tenant, may, *("-" if c is None else str(c) for c in counts)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
