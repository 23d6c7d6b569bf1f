"""The whole API against its own description: what schemathesis makes of /openapi.json is answered as described.

The app, the engine and the text side are the real ones; only the model is not there. Requests that the description
allows and requests that it does not, without keys and behind the door, with a key and without one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from doorserver import Running, secret_of, serving
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks
from schemathesis.generation import GenerationMode

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

checks.load_all_checks()
CHECKS = [
    checks.not_a_server_error,
    *(
        checks.CHECKS.get_one(name)
        for name in (
            "status_code_conformance",
            "content_type_conformance",
            "response_headers_conformance",
            "response_schema_conformance",
            "negative_data_rejection",
        )
    ),
]
ENDLESS = "/debug/kv/stream"
BOUNDED = ("max_tokens", "max_completion_tokens", "max_output_tokens")
# Operations that make text: some of what their description allows has to be accepted, or the test would prove nothing.
TALKING = {
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/sessions/{id}/messages",
    "POST /tokenize",
}


class Known:
    """What the description cannot know: the model's name, ids of things that are there, and how long a test may be."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self.url, self.headers = url, headers

    def session(self) -> str:
        made = httpx.post(f"{self.url}/v1/sessions", json={}, headers=self.headers, trust_env=False)
        return str(made.json()["id"])

    def response(self) -> str:
        body = {"input": "x", "max_output_tokens": 2}
        made = httpx.post(f"{self.url}/v1/responses", json=body, headers=self.headers, trust_env=False)
        return str(made.json()["id"])

    def fill(self, case: Any, number: int) -> None:
        if isinstance(case.body, dict):
            if "model" in case.body:
                case.body["model"] = "tiny"
            for name in (
                "n",
                "best_of",
                "use_beam_search",
                "min_tokens",
                "stop_token_ids",
                "logit_bias",
                "prompt_logprobs",
            ):
                case.body.pop(name, None)
            case.body.pop("previous_response_id", None)
            if number % 2 and "messages" in case.body:
                # What no schema can say: a tool's result answers a call, the template shows every field. The others are
                # sent as they are.
                case.body["messages"] = [{"role": "user", "content": "x"}]
                for name in ("tools", "tool_choice"):
                    case.body.pop(name, None)
            for name in BOUNDED:
                case.body.pop(name, None)
            if case.operation.label in TALKING - {"POST /tokenize"}:
                case.body["max_output_tokens" if "responses" in case.path else "max_tokens"] = 2
        if number % 2 and case.operation.path.startswith("/v1/sessions/{id}"):
            case.path_parameters["id"] = self.session()
        if number % 2 and case.operation.path.startswith("/v1/responses/{id}"):
            case.path_parameters["id"] = self.response()


def requests_of(operation: Any, mode: GenerationMode, examples: int) -> Iterator[Any]:
    found: list[Any] = []

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def collect(case: Any) -> None:
        found.append(case)

    try:
        collect()
    except Unsatisfiable:  # nothing in it can be wrong
        return
    yield from found


def attack(url: str, key: str | None, examples: int) -> dict[str, Counter[int]]:
    """Statuses by operation. Raises: schemathesis' own failures, with a curl command."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=headers)
    known = Known(url, headers)
    seen: dict[str, Counter[int]] = defaultdict(Counter)
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path == ENDLESS:
            continue
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            for number, case in enumerate(requests_of(operation, mode, examples)):
                if mode is GenerationMode.POSITIVE:
                    known.fill(case, number)
                response = case.call(headers=headers, timeout=20)
                case.validate_response(response, checks=CHECKS, headers=headers)
                seen[operation.label][response.status_code] += 1
                # schemathesis leaves the key out, too, or makes one up, when it is to send what is wrong
                assert response.status_code != 401 or (key and mode is GenerationMode.NEGATIVE)
    return seen


async def nothing_is_left(server: Running) -> None:
    await server.idle()
    text = server.services.engine.metrics.registry  # type: ignore[attr-defined]
    rows = {(s.name, s.labels.get("state", "")): s.value for family in text.collect() for s in family.samples}
    assert rows[("chatsvc_requests_running", "")] == rows[("chatsvc_requests_waiting", "")] == 0
    assert rows[("chatsvc_kv_blocks", "used")] == 0
    assert not server.turns._turns


async def test_every_answer_is_described() -> None:
    async with serving() as server:
        seen = await asyncio.to_thread(attack, server.url, None, 6)
        for label in TALKING:
            assert seen[label][200], (label, seen[label])
        assert len(seen) > 15 and sum(map(sum, (c.values() for c in seen.values()))) > 150
        await nothing_is_left(server)


async def test_every_answer_is_described_behind_the_door() -> None:
    async with serving(ann={}) as server:
        seen = await asyncio.to_thread(attack, server.url, secret_of("ann"), 3)
        assert seen["POST /v1/chat/completions"][200]
        await nothing_is_left(server)


async def test_without_a_key_there_is_nothing_but_401() -> None:
    async with serving(ann={}) as server:
        # The description itself needs the key.
        document = await asyncio.to_thread(
            httpx.get,
            server.url + "/openapi.json",
            headers={"Authorization": f"Bearer {secret_of('ann')}"},
            trust_env=False,
        )
        schema = schemathesis.openapi.from_dict(document.json())
        schema.config.update(base_url=server.url)

        def attack_without() -> Counter[tuple[bool, int]]:
            seen: Counter[tuple[bool, int]] = Counter()
            for result in schema.get_all_operations():
                operation = result.ok()
                for case in requests_of(operation, GenerationMode.POSITIVE, 2):
                    response = case.call(timeout=20)
                    case.validate_response(response, checks=CHECKS)
                    seen[operation.path in ("/health", "/ready"), response.status_code] += 1
            return seen

        seen = await asyncio.to_thread(attack_without)
        assert set(seen) == {(True, 200), (False, 401)}
        await nothing_is_left(server)
