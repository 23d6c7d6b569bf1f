"""A real server is stopped, or killed, and started again: the long prompt is still known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SYSTEM = "You are the clerk of a shop. " + " ".join(f"Item {i * 7} costs {i * 3} euros." for i in range(60))


def chat(server: Served, question: str) -> tuple[str, int, int]:
    """(answer, prompt tokens, those of them that were cached)."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
    answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    usage = answer["usage"]
    text = answer["choices"][0]["message"]["content"]
    return text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_the_prompt_is_known_after_a_restart(tmp_path: Path) -> None:
    flags = {"disk_cache_dir": tmp_path / "cache", "kv_cache_memory": "256MiB"}
    texts = []
    for life in range(3):
        folder = tmp_path / str(life)
        folder.mkdir()
        server = Served(folder, **flags)
        try:
            server.wait()
            text, prompt, cached = chat(server, "What does item 14 cost?")
            texts.append(text)
            assert prompt > 500
            assert cached >= prompt - 16 if life else cached == 0, (life, cached)
            if life == 2:
                assert chat(server, "And item 21?")[2] > 450
                server.process.kill()  # costs only what came since the last save
        finally:
            server.stop()
        assert "Traceback" not in server.text, server.text
        assert "ignored" not in server.text, server.text
    assert texts[0] == texts[1] == texts[2]
    folder = tmp_path / "another"
    folder.mkdir()
    other = Served(folder, **flags, dtype="bfloat16", attention_backend="torch")
    try:
        assert chat(other.wait(), "What does item 14 cost?")[2] == 0
    finally:
        assert other.stop() == 0, other.text
    files = list((tmp_path / "cache").iterdir())
    assert len(files) == 2 and all(f.stat().st_mode & 0o777 == 0o600 for f in files)
