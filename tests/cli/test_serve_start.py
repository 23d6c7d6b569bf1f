"""What a start refuses, and what it only remarks on."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from chatsvc.cli.options import given, options_of
from chatsvc.cli.remarks import is_loopback, remarks
from chatsvc.cli.serve import command
from chatsvc.config import ServeConfig
from chatsvc.engine.build import build
from chatsvc.errors import ConfigError, ModelError
from chatsvc.sessions.select import open_store


def said(environ: dict[str, str] | None = None, **options: str) -> list[str]:
    return list(remarks(ServeConfig.of(**options), environ or {}))


def test_a_variable_that_nobody_reads_is_named_with_the_closest() -> None:
    found = said({"CHATSVC_MAX_QUEUES": "3", "CHATSVC_PORT": "1", "CHATSVC_URL": "x", "PATH": "/", "CHATSVC_XYZZY": ""})
    assert len(found) == 2
    assert "CHATSVC_MAX_QUEUES is unknown" in found[0] and "(--max-queue)" in found[0]
    assert "CHATSVC_XYZZY" in found[1] and "--" not in found[1]


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True)]
    + [(h, False) for h in ("0.0.0.0", "::", "10.0.0.1", "my-machine")],
)
def test_an_open_door_is_one_line(host: str, local: bool) -> None:
    assert is_loopback(host) is local
    assert len(said(host=host)) == (0 if local else 1)


def test_a_start_loads_nothing_that_it_may_not_need() -> None:
    """torch runs where the engine does, which may be elsewhere; a store's client comes with its store."""
    code = (
        "import gc, sys; from chatsvc.cli.main import cli; cli.get_command(None, 'serve'); assert gc.isenabled(); "
        "print([m for m in ('torch', 'redis', 'triton', 'transformers', 'opentelemetry') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "chatsvc", "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: chatsvc ") and "doctor" in done.stdout


def test_help_shows_times_as_one_writes_them() -> None:
    text = CliRunner().invoke(command, ["--help"]).output
    assert "[30d]" in text and "[60s]" in text and "0: none" in text and "e+06" not in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_memory": "10TiB"}, "lower --kv-cache-memory"),
        ({"num_kv_blocks": "99999999"}, "lower --num-kv-blocks"),
        (
            {"executor": "simulated", "num_kv_blocks": "20", "max_model_len": "4096"},
            "--max-model-len 4096 needs 256 blocks",
        ),
    ],
)
def test_a_pool_larger_than_the_memory_is_refused_before_anything_is_loaded(
    options: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(ServeConfig.of(**options))


def test_the_early_look_at_the_pool_does_not_log_what_the_load_will_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    build(ServeConfig.of(num_kv_blocks="10"))
    assert "lowered" not in caplog.text


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"threads": "100000"}, "--threads: .*1024"),
        ({"threads": "1025"}, "--threads: "),
        ({"threads": "0"}, "--threads: "),
        ({"served_model_name": ""}, "--served-model-name: "),
        ({"cache_secret": ""}, "--cache-secret: "),
        ({"host_kv_memory": "lots"}, "--host-kv-memory: a size is .*, e.g. 512MiB$"),
        ({"kv_cache_memory": "5 XiB"}, "--kv-cache-memory: a size is "),
        ({"disk_cache_size": "-1"}, "--disk-cache-size: a size is "),
        ({"disk_cache_size": "1,5GiB"}, "--disk-cache-size: a size is "),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_by_its_flag(options: dict[str, str], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}"):
        ServeConfig.of(**options)


def test_sizes() -> None:
    sizes = {"0": 0, "1000": 1000, " 512MiB ": 2**29, "1.5 GiB": 3 * 2**29, ".5k": 500, "2gb": 2 * 10**9}
    for text, size in sizes.items():
        assert ServeConfig.of(kv_cache_memory=text).kv_bytes == size
    assert ServeConfig.of(kv_cache_memory=12).kv_bytes == 12


@pytest.mark.parametrize("flag", ["--served-model-name", "--cache-secret"])
def test_a_flag_with_nothing_is_refused_and_an_empty_variable_is_none(flag: str) -> None:
    @click.command()
    @options_of(ServeConfig)
    def asked(**values: object) -> None:
        click.echo(repr(given(values)))

    assert str(CliRunner().invoke(asked, [flag, ""]).exception) == f"{flag}: is empty"
    variable = "CHATSVC_" + flag[2:].upper().replace("-", "_")
    assert CliRunner(env={variable: ""}).invoke(asked, []).output == "{}\n"


def test_a_folder_as_chat_template(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is a folder, not a file") as caught:
        build(ServeConfig.of(chat_template=str(tmp_path)))
    assert "Errno" not in str(caught.value)


@pytest.mark.parametrize("text", ["my-machine\n", "", "{% for m in messages %}{{ m.role }}: {% endfor %}"])
def test_a_chat_template_that_shows_no_message_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(text)
    with pytest.raises(ModelError, match=r"^--chat-template .*template.jinja does not show the user's messages"):
        build(ServeConfig.of(chat_template=str(file)))
    file.write_text("{% for m in messages %}{{ m.role }}: {{ m.content | trim }}\n{% endfor %}")
    build(ServeConfig.of(chat_template=str(file)))


async def test_a_session_file_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    store = open_store(f"sqlite:///{tmp_path}/nope/x.db", 60)
    with pytest.raises(ConfigError, match=r"the folder .*nope is not there"):
        await store.open()
    assert list(tmp_path.iterdir()) == []
