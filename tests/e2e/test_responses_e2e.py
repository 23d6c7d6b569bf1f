"""/v1/responses with the real model and store: conversations, the cache, and a server that is killed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MODEL = "smollm2-135m"


@contextmanager
def client(server: Served) -> Iterator[Any]:
    http = httpx.Client(trust_env=False, timeout=120)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="-", max_retries=0, http_client=http) as sdk:
        yield sdk.responses


def test_RD_06_a_killed_server_keeps_its_responses(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        with client(server.wait()) as api:
            first = api.create(
                model=MODEL, input="Name three colours, with a word about each.", temperature=0, max_output_tokens=40
            )
            second = api.create(
                model=MODEL, input="And animals?", previous_response_id=first.id, temperature=0, max_output_tokens=12
            )
            # All of the first turn is in the cache, the answer as it was generated.
            assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 17
            running = api.create(
                model=MODEL,
                input="Tell me a long story.",
                previous_response_id=second.id,
                background=True,
                max_output_tokens=4000,
                extra_body={"ignore_eos": True},
            )
            while not (seen := api.retrieve(running.id).output_text):
                time.sleep(0.05)
            time.sleep(2.5)  # the text is stored about once a second
    finally:
        server.process.kill()
        server.stop()
    server = Served(tmp_path)
    try:
        with client(server.wait()) as api:
            cut = api.retrieve(running.id)
            assert cut.status == "failed" and "server stopped" in cut.error.message
            assert cut.output_text.startswith(seen) and cut.output[0].status == "incomplete"
            assert api.retrieve(second.id).model_dump() == second.model_dump()
            again = api.create(
                model=MODEL, input="And animals?", previous_response_id=first.id, temperature=0, max_output_tokens=12
            )
            assert again.output_text == second.output_text
            assert api.create(model=MODEL, input="Go on.", previous_response_id=cut.id, max_output_tokens=4).output_text
            server.idle()
    finally:
        assert server.stop() == 0, server.text
    assert "Traceback" not in server.text, server.text
