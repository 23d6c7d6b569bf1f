"""Command-line options made from a configuration model: one source for flag, variable, type and help."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from chatsvc.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


class GroupedCommand(click.Command):
    """``--help`` prints the options in the groups of the configuration model."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", "Other"), []).append(record)
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


class GroupedOption(click.Option):
    def __init__(self, *args: Any, group: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.group = group


def _shown(info: FieldInfo) -> str:
    """The default as one would write it: ``30d``, not 2592000 seconds."""
    value = info.default
    if not isinstance(value, float):
        return str(value)
    if any(isinstance(m, BeforeValidator) for m in info.metadata):  # a time, which takes units
        for unit, seconds in (("d", 86400), ("h", 3600)):
            if value >= seconds and value % seconds == 0:
                return f"{value / seconds:g}{unit}"
        return f"{value:g}s"
    return f"{value:g}"


def _option(name: str, info: FieldInfo) -> Callable[[F], F]:
    flag = "--" + name.replace("_", "-")
    extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    choices = typing.get_args(info.annotation) if typing.get_origin(info.annotation) is typing.Literal else ()
    help_text = info.description or ""
    if info.default is not None and not choices and not isinstance(info.default, bool):
        help_text += f" [{_shown(info)}]"
    common: dict[str, Any] = {
        "cls": GroupedOption,
        "group": extra.get("group", "Other"),
        "envvar": "CHATSVC_" + name.upper(),
        "default": None,
        "help": help_text,
    }
    if info.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, **common)
    if choices:
        common["help"] += f" [{info.default}]"
        return click.option(flag, name, type=click.Choice([str(c) for c in choices]), **common)
    return click.option(flag, name, type=str, metavar="VALUE", **common)


def options_of(model: type[BaseModel], only: Iterable[str] | None = None) -> Callable[[F], F]:
    """Add an option for every field (or those in ``only``); values arrive as strings and are validated by the model."""

    def decorate(f: F) -> F:
        wanted = set(only) if only is not None else None
        for name, info in reversed(list(model.model_fields.items())):
            if wanted is None or name in wanted:
                f = _option(name, info)(f)
        return f

    return decorate


# What is not a name when it is empty, and is not left out by that either.
NAMES = ("model", "served_model_name", "cache_secret", "host")


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Drop options that were not given, so that the model's defaults hold. An empty variable counts as not given, and
    so does an empty flag of what can be left out: ``--api-key-file ""`` is none, whatever the variable says.

    Raises: ConfigError that names a flag given with nothing.
    """
    context = click.get_current_context(silent=True)
    for name in NAMES:
        if values.get(name) == "" and context and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name.replace('_', '-')}: is empty")
    return {k: v for k, v in values.items() if v is not None and v != ""}
