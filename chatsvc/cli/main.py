"""The ``chatsvc`` command. Each verb's module is imported when the verb is used, so that ``--help`` is instant."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time

import click

from chatsvc import __version__
from chatsvc.errors import ChatsvcError

VERBS = {
    "serve": ("chatsvc.cli.serve", "the server"),
    "chat": ("chatsvc.cli.chat", "terminal chat, against a running server or with the model in process"),
    "bench": ("chatsvc.cli.bench", "benchmarks: this engine against its own baseline modes"),
    "key": ("chatsvc.cli.key", "make an API key, list those there are"),
    "simulate": ("chatsvc.cli.simulate", "the same scheduler and block manager on a modelled GPU"),
    "pull": ("chatsvc.cli.pull", "fetch a model, with a progress bar"),
    "doctor": ("chatsvc.cli.doctor", "what hardware, kernels, model and store will be used, and what is wrong"),
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        gc.disable()  # what is imported stays: to look for garbage among it is a fifth of the time
        try:
            command = importlib.import_module(VERBS[cmd_name][0]).command
        finally:
            gc.freeze()
            gc.enable()
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(cls=LazyGroup)
@click.version_option(__version__)
def cli() -> None:
    """chatsvc: a streaming chat service that people host themselves."""


def main() -> None:
    began = time.perf_counter()
    # Before torch is imported: worker threads that spin between two small operations would take the event loop's
    # core, and whole time slices from any other process on the machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        cli(prog_name="chatsvc", obj=began)
    except ChatsvcError as e:
        print(f"chatsvc: {e}", file=sys.stderr)
        sys.exit(1)
