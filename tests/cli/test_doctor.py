from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner

from chatsvc.cli.doctor import Finding, _safely, _store, collect, command, render
from chatsvc.cli.serve import listen
from chatsvc.config import ServeConfig
from chatsvc.errors import ConfigError
from kernels.cpu.build import compiler


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.topic: finding.level for finding in findings}


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def test_a_sound_machine(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/chats.db"
    findings = collect(ServeConfig.of(session_store=store, port=str(free_port())))
    found = levels(findings)
    assert {"software", "processor", "memory", "gpu", "attention", "compiler", "model", "kv cache"} <= set(found)
    assert "fail" not in found.values()
    text = render(findings)
    assert "Ready to serve." in text and "SmolLM2" in text and "49152 tokens" in text
    assert list(tmp_path.iterdir()) == [], "looking changes nothing"


@pytest.mark.parametrize(
    ("options", "topic", "text"),
    [
        ({"model": "nonsense"}, "model", "no file or directory nonsense"),
        ({"model": "owner/unknown"}, "model", "chatsvc pull owner/unknown"),
        ({"session_store": "mongo://x"}, "store", "mongo://"),
        ({"kv_cache_memory": "900TiB"}, "kv cache", "lower --kv-cache-memory"),
        ({"api_key_file": "/nowhere/keys.toml"}, "keys", "No such file"),
    ],
)
def test_what_is_missing_is_named(options: dict[str, str], topic: str, text: str) -> None:
    findings = collect(ServeConfig.of(**{"session_store": "memory://", **options}))
    assert levels(findings)[topic] == "fail"
    assert any(text in finding.text for finding in findings if finding.topic == topic)
    assert "will not work" in render(findings)


def test_an_address_that_is_taken_is_what_serve_says() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = collect(ServeConfig.of(session_store="memory://", port=str(port)))
        with pytest.raises(ConfigError, match="Address already in use"):
            listen("127.0.0.1", port)
    (address,) = (finding for finding in found if finding.topic == "address")
    assert address.level == "fail" and "Address already in use" in address.text and "--port" in address.text
    assert levels(found)["sessions"] == "warn" and "Ready to serve" not in render(found)


def test_a_redis_that_is_away_is_a_warning_with_its_reason() -> None:
    """``serve`` starts, chats work, and sessions wait for it."""
    (found,) = _store(ServeConfig.of(session_store="redis://:secret@127.0.0.1:1/0"))
    assert found.level == "warn" and found.topic == "sessions"
    assert "connecting to 127.0.0.1:1" in found.text and "503" in found.text and "secret" not in found.text


@pytest.mark.parametrize("password", ["", ":wrong-one@"])
def test_a_redis_that_wants_another_password(password: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=refuse_all, args=(server,), daemon=True)
        thread.start()
        url = f"redis://{password}127.0.0.1:{server.getsockname()[1]}/0"
        (found,) = _safely(_store, ServeConfig.of(session_store=url))
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert found.level == "fail" and "password" in found.text and "wrong-one" not in found.text
    assert ("invalid username-password pair" if password else "Authentication required") in found.text


def refuse_all(server: socket.socket) -> None:
    """What a Redis with a password says to everybody, whatever is sent."""
    while True:
        try:
            sock = server.accept()[0]
        except OSError:
            return
        with sock:
            while data := sock.recv(4096):
                for command in data.split(b"*")[1:]:
                    auth = b"AUTH" in command.upper()
                    sock.sendall(
                        b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
                        if auth
                        else b"-NOAUTH Authentication required.\r\n"
                    )


def test_exit_code() -> None:
    runner = CliRunner()
    assert runner.invoke(command, ["--session-store", "memory://", "--port", str(free_port())]).exit_code == 0
    result = runner.invoke(command, ["--model", "nonsense"])
    assert result.exit_code == 1 and "FAIL" in result.output


def test_attention_with_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def attention(**options: str) -> Finding:
        found = collect(ServeConfig.of(session_store="memory://", **options))
        return next(f for f in found if f.topic in ("attention", "kernels"))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if compiler():
        with monkeypatch.context() as shared:
            shared.delenv("XDG_CACHE_HOME")
            assert "CpuBackend on cpu, float32 products" in attention().text or "first start" in attention().text
            assert "int8 products" in attention(quantization="int8").text or "first start" in attention().text
        assert "first start compiles" in attention().text
        assert list(tmp_path.iterdir()) == [], "looking changes nothing"
    with monkeypatch.context() as broken:
        broken.setenv("CXX", "/bin/false")
        found = {f.topic: f for f in collect(ServeConfig.of(session_store="memory://"))}
        assert (found["compiler"].level, found["attention"].level) == ("warn", "warn")
        assert "/bin/false compiles no C++20" in found["compiler"].text
    assert "TorchBackend" in attention(attention_backend="torch").text
    assert "TorchBackend" in attention(dtype="bfloat16").text
    refused = collect(ServeConfig.of(session_store="memory://", quantization="int8", attention_backend="torch"))
    assert any(f.level == "fail" and "--quantization int8" in f.text for f in refused)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert attention(quantization="int8").level == "fail"
    assert attention().level == "warn" and "C++ compiler" in attention().text
    assert attention(attention_backend="cpu").level == "fail"


def test_keys(tmp_path: Path) -> None:
    from chatsvc.cli.doctor import _keys

    file = tmp_path / "keys.toml"
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{"0" * 64}"\n')
    for mode, host, level in ((0o600, "0.0.0.0", "ok"), (0o644, "::", "ok"), (0o666, "::1", "warn")):
        file.chmod(mode)
        (found,) = _keys(ServeConfig.of(api_key_file=str(file), host=host))
        assert found.level == level and found.text.startswith("1 in ")
    assert [_keys(ServeConfig.of(host=h))[0].level for h in ("127.0.0.1", "0.0.0.0")] == ["ok", "warn"]
