"""OpenAI's package for Node and Vercel's AI SDK, where ``make clients`` could install them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from clientserver import MODEL, Clients

NODE = Path(__file__).parent / "node"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.skipif(not (NODE / "node_modules").is_dir(), reason="not installed: make clients")
@pytest.mark.parametrize("script", ["openai", "ai"])
def test_node(server: Clients, script: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    env |= {"CHATSVC_TEST_URL": server.url, "CHATSVC_TEST_MODEL": MODEL}
    command = ["node", "--test", f"{script}.test.mjs"]
    done = subprocess.run(command, cwd=NODE, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
