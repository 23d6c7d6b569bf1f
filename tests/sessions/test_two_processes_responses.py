"""/v1/responses over two servers on one Redis: made by one, looked at, gone on with and cancelled through the other."""

from __future__ import annotations

import asyncio
from typing import Any

from redisserver import RedisServer
from sessionserver import Running
from test_two_processes import pair


async def create(app: Running, **fields: Any) -> dict[str, Any]:
    made = await app.http.post("/v1/responses", json={"input": "x", "max_output_tokens": 8, "seed": 1, **fields})
    assert made.status_code == 200, made.text
    return dict(made.json())


async def read(app: Running, response: dict[str, Any]) -> dict[str, Any]:
    got = await app.http.get(f"/v1/responses/{response['id']}")
    assert got.status_code == 200, got.text
    return dict(got.json())


async def test_a_response_is_everywhere(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        first = await create(one)
        assert await read(two, first) == first
        second = await create(two, previous_response_id=first["id"])
        assert await read(one, second) == second
        assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]

        running = await create(
            one, previous_response_id=second["id"], background=True, max_output_tokens=4000, ignore_eos=True
        )
        assert (await read(two, running))["status"] == "in_progress"
        # The branch is busy over there: the other process answers on a copy of it.
        beside = await create(two, previous_response_id=second["id"])
        assert beside["status"] in ("completed", "incomplete") and beside["id"][:37] != running["id"][:37]
        refused = await two.http.post("/v1/responses", json={"input": "y", "previous_response_id": running["id"]})
        assert refused.status_code == 409

        ended = await two.http.post(f"/v1/responses/{running['id']}/cancel")
        assert ended.json()["status"] == "cancelled" == (await read(one, running))["status"]
        await asyncio.gather(one.idle(), two.idle())
        after = await create(two, previous_response_id=running["id"])
        assert after["previous_response_id"] == running["id"]


async def test_what_one_process_deletes_is_gone_in_the_other(redis_server: RedisServer) -> None:
    async with pair(redis_server) as (one, two):
        first = await create(one)
        second = await create(two, previous_response_id=first["id"])
        url = "/v1/responses/{}"
        items = await one.http.get(url.format(second["id"]) + "/input_items", params={"order": "asc"})
        assert (
            items.json()
            == (await two.http.get(url.format(second["id"]) + "/input_items", params={"order": "asc"})).json()
        )
        assert [i["role"] for i in items.json()["data"]] == ["user", "assistant", "user"]
        running = await create(
            one, previous_response_id=second["id"], background=True, max_output_tokens=4000, ignore_eos=True
        )
        assert (await two.http.delete(url.format(running["id"]))).json()["deleted"] is True  # ends it over there
        await one.idle()
        assert (await one.http.get(url.format(running["id"]))).status_code == 404
        # Both at once: neither process knows what the other is about to delete, and yet nothing is left.
        gone = await asyncio.gather(one.http.delete(url.format(first["id"])), two.http.delete(url.format(second["id"])))
        assert [g.status_code for g in gone] == [200, 200]
        for app in (one, two):
            assert (await app.http.get(url.format(second["id"]))).status_code == 404
            assert (await app.http.get(f"/v1/sessions/sess_{first['id'][5:37]}")).status_code == 404
