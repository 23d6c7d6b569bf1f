"""Recorded traces: JSON lines, one request each, without anybody's text.

::

    {"id": 0, "arrival": 0.35, "tenant": "acme", "prompt": [["system/acme", 500], ["u0", 161]], "answer": "a0",
     "output_len": 338}
    {"id": 1, "arrival": 0.35, "tenant": "acme", "prompt": [["system/acme", 500], ["u0", 161], ["a0", 338], ["u1", 40]],
     "answer": "a1", "output_len": 90, "after": 0, "think": 12.5}
    {"arrival": 1.1, "prompt_len": 161, "output_len": 338}

A segment is a key (a name or the hash of its token ids) and a length in tokens; equal keys hold equal tokens. The third
form is enough when nothing is shared. ``after`` and ``think``: the request is sent that many seconds after the answer
to request ``after`` has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from chatsvc.errors import ConfigError
from chatsvc.sim.traces import Entry


def write(path: Path, trace: Iterable[Entry]) -> None:
    with path.open("w", encoding="utf-8") as f:
        for e in trace:
            line: dict[str, Any] = {"id": e.entry_id, "arrival": e.arrival, "tenant": e.tenant}
            line |= {"prompt": e.prompt, "answer": e.answer, "output_len": e.output_len}
            if e.after is not None:
                line |= {"after": e.after, "think": e.think}
            f.write(json.dumps(line) + "\n")


def read(path: Path) -> list[Entry]:
    """Entries in the order of the file; ids become 0, 1, 2...

    Raises:
        ConfigError: not readable, or a line is not a request (the line's number is named).
    """
    made: list[Entry] = []
    ids: dict[Any, int] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"trace {path}: {e}") from e
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            entry = _entry(raw, len(made), ids)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ConfigError(f"trace {path}, line {number}: {type(e).__name__}: {e}") from e
        ids[raw.get("id", entry.entry_id)] = entry.entry_id
        made.append(entry)
    if not made:
        raise ConfigError(f"trace {path} is empty")
    return made


def _entry(raw: dict[str, Any], i: int, ids: dict[Any, int]) -> Entry:
    """Raises: KeyError, ValueError, TypeError for anything that is not a request."""
    segments = raw["prompt"] if "prompt" in raw else [[f"prompt/{i}", raw["prompt_len"]]]
    prompt = tuple((str(key), int(n)) for key, n in segments)
    entry = Entry(
        i,
        float(raw["arrival"]),
        str(raw.get("tenant", "")),
        prompt,
        str(raw.get("answer", f"answer/{i}")),
        int(raw["output_len"]),
        ids[raw["after"]] if raw.get("after") is not None else None,
        float(raw.get("think", 0.0)),
    )
    if entry.output_len < 1 or entry.prompt_len < 1 or any(n < 1 for _, n in prompt):
        raise ValueError("lengths must be at least 1")
    if not (0 <= entry.arrival < float("inf") and 0 <= entry.think < float("inf")):
        raise ValueError("times must be finite and not negative")
    return entry
