"""The description says of keys what is true: held against every route of a server with them, and of one without."""

from __future__ import annotations

from typing import Any

import pytest
from doorserver import MESSAGES, serving

pytestmark = pytest.mark.asyncio


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(m, p, o) for p, item in document["paths"].items() for m, o in item.items()]


async def test_with_keys() -> None:
    async with serving(ann={"requests_per_minute": 1}, prom={"allow": ["metrics"]}, none={"allow": ["debug"]}) as door:
        document = (await door["ann"].get("/openapi.json")).json()
        assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
        assert document["security"] == [{"key": []}]
        assert len(operations(document)) >= 25
        for method, path, operation in operations(document):
            target = path.replace("{id}", "x").replace("{mid}", "y")
            open_ = operation.get("security") == []
            nobody = await door.nobody.request(method, target)
            assert (nobody.status_code == 401) == ("401" in operation["responses"]) == (not open_), (method, path)
            if not open_ and not target.endswith("/debug/kv/stream"):
                wrong_area = door["prom" if not target.startswith("/metrics") else "none"]
                refused = await wrong_area.request(method, target)
                assert (refused.status_code == 403) == ("403" in operation["responses"]), (method, path)
        chat = document["paths"]["/v1/chat/completions"]["post"]
        assert any(p["name"] == "X-Request-Timeout" for p in chat["parameters"]) and "408" in chat["responses"]
        body = {"messages": MESSAGES, "max_tokens": 1}
        await door["ann"].post("/v1/chat/completions", json=body)
        limited = await door["ann"].post("/v1/chat/completions", json=body)
        assert limited.status_code == 429
        named = {name.lower() for name in chat["responses"]["429"]["headers"]}
        assert {h for h in limited.headers if h.startswith(("x-ratelimit", "retry-after"))} <= named


async def test_without_keys() -> None:
    async with serving() as door:
        document = (await door.nobody.get("/openapi.json")).json()
        assert "securitySchemes" not in document["components"] and "security" not in document
        for _, path, operation in operations(document):
            assert not {"401", "403"} & set(operation["responses"]) and "security" not in operation, path
        assert (await door.nobody.get("/v1/models")).status_code == 200
