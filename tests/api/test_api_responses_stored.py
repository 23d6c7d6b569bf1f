"""What is done with stored responses: deleting them and listing what they were made from, by the openai package."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from scripted import ScriptedEngine, Server, text_script
from test_api_fields import prompt_of, refused
from test_api_responses import CALL, WEATHER

from chatsvc.api.openapi_responses import ItemList, ResponseDeleted
from chatsvc.api.responses_delete import is_blank, is_deleted, without
from chatsvc.api.services import ApiSettings
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.memory import MemoryStore


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore(3600)


@pytest.fixture(scope="module")
def _server(store: MemoryStore) -> Iterator[Server]:
    with Server(ApiSettings(ping_interval=0.2, resume_grace=0.3), store=store) as server:
        yield server


@pytest.fixture
def api(sdk: openai.OpenAI) -> Any:
    return sdk.responses


def gone(api: Any, response_id: str) -> None:
    for call in (api.retrieve, api.delete, api.cancel, lambda i: list(api.input_items.list(i))):
        with pytest.raises(openai.NotFoundError):
            call(response_id)
    with pytest.raises(openai.BadRequestError):
        api.create(input="x", previous_response_id=response_id)


def session_of(response_id: str) -> str:
    return "sess_" + response_id[5:37]


def test_a_deleted_response_is_gone_with_its_session(api: Any, http: httpx.Client) -> None:
    made = api.create(input="secret")
    assert http.get(f"/v1/sessions/{session_of(made.id)}").status_code == 200
    assert api.delete(made.id) is None
    gone(api, made.id)
    assert http.get(f"/v1/sessions/{session_of(made.id)}").status_code == 404
    again = api.create(input="x")
    told = http.delete(f"/v1/responses/{again.id}").json()
    assert ResponseDeleted.model_validate(told).model_dump() == {"id": again.id, "object": "response", "deleted": True}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_past_of_a_living_response_is_told_and_goes_with_it(
    api: Any, server: Server, http: httpx.Client, order: tuple[int, ...]
) -> None:
    made = [api.create(input="one")]
    made.append(api.create(input="two", previous_response_id=made[0].id))
    made.append(api.create(input="three", previous_response_id=made[1].id))
    url = f"/v1/sessions/{session_of(made[0].id)}"
    left = {0, 1, 2}
    for deleted in order:
        api.delete(made[deleted].id)
        gone(api, made[deleted].id)
        left.remove(deleted)
        for i in left:
            assert api.retrieve(made[i].id).output_text == "Hello 0"
            answer = api.create(input="more", previous_response_id=made[i].id)
            past = "".join(f"user: {word}assistant: Hello 0" for word in ("one", "two", "three")[: i + 1])
            assert prompt_of(server.engine) == f"{past}user: moreassistant: "
            api.delete(answer.id)
        if left:
            shown = [m["content"] for m in http.get(url).json()["messages"] if m["role"] == "user"]
            assert shown == ["one", "two", "three"][: max(left) + 1]
    assert http.get(url).status_code == 404


def test_two_deletions_at_once_leave_nothing_behind(
    api: Any, server: Server, http: httpx.Client, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process deletes the other response of a session at the same moment: neither knows of the other."""
    first = api.create(input="one")
    second = api.create(input="two", previous_response_id=first.id)
    rewrite = store.rewrite

    async def at_the_same_time(tenant: str, session_id: str, messages: list[Message]) -> None:
        monkeypatch.undo()
        session = await store.get(tenant, session_id)
        assert session is not None
        theirs = without(session, "msg_" + first.id[37:])
        await rewrite(tenant, session_id, messages)
        await rewrite(tenant, session_id, theirs.changed)

    monkeypatch.setattr(store, "rewrite", at_the_same_time)
    api.delete(second.id)
    for made in (first, second):
        gone(api, made.id)
    assert http.get(f"/v1/sessions/{session_of(first.id)}").status_code == 404


def test_one_that_is_being_made_ends(api: Any, server: Server, http: httpx.Client) -> None:
    first = api.create(input="one")
    server.call(server.engine.gate.clear)
    running = api.create(input="two", previous_response_id=first.id, background=True)
    api.delete(running.id)
    server.until(lambda e: not e.running)
    gone(api, running.id)
    server.call(server.engine.gate.set)
    session = http.get(f"/v1/sessions/{session_of(first.id)}").json()
    assert [m["content"] for m in session["messages"]] == ["one", "Hello 0"]


def test_a_chat_goes_on_beside_what_was_deleted(api: Any, server: Server, http: httpx.Client) -> None:
    first = api.create(input="one")
    second = api.create(input="two", previous_response_id=first.id)
    api.delete(second.id)
    url = f"/v1/sessions/{session_of(first.id)}"
    with http.stream("POST", f"{url}/messages", json={"content": "chat"}) as answer:  # follows the newest there is
        answer.read()
    assert prompt_of(server.engine) == "user: oneassistant: Hello 0user: chatassistant: "
    api.delete(first.id)
    assert [m["content"] for m in http.get(url).json()["messages"]] == ["one", "Hello 0", "chat", "Hello 0"]
    blank = "msg_" + second.id[37:]
    assert http.post(f"{url}/messages", json={"content": "x", "parent_id": blank}).status_code == 400
    assert http.post(f"{url}/messages/{blank}/regenerate", json={}).status_code == 404
    assert http.post(f"{url}/fork", json={"message_id": blank}).status_code == 404


def test_without_is_what_a_plain_model_says() -> None:
    """Random trees, random order: what is kept is what a living answer has behind it, and nothing else."""
    draw = random.Random(5)
    for _ in range(150):
        session, parents = Session("sess_r1", ""), {}
        answers: list[str] = []
        for n in range(draw.randint(1, 9)):
            above = draw.choice([None, *answers])
            user = Message(f"msg_u{n}", above, "user", f"u{n}", extra={"items": []})
            answer = Message(f"msg_a{n}", user.id, "assistant", f"a{n}", extra={"response": {}, "calls": None})
            session.messages += [user, answer]
            parents |= {user.id: above, answer.id: user.id}
            answers.append(answer.id)
        texts = {m.id: m.content for m in session.messages}
        living = set(answers)
        for victim in draw.sample(answers, len(answers)):
            living.discard(victim)
            rest = without(session, victim)
            changed = {m.id: m for m in rest.changed}
            session.messages = [changed.get(m.id, m) for m in session.messages]
            needed: set[str] = set()
            for at in living:
                here: str | None = at
                while here is not None:
                    needed.add(here)
                    here = parents[here]
            assert rest.nothing_left == (not living)
            assert {m.id for m in session.messages if not is_blank(m)} == needed
            assert {m.id for m in session.messages if m.role == "assistant" and not is_deleted(m)} == living
            assert all(m.content == texts[m.id] for m in session.messages if m.id in needed)
            assert all("u" not in m.content and "a" not in m.content for m in session.messages if m.id not in needed)
            assert not without(session, victim).changed or not living


def test_the_items_are_all_that_it_was_made_from(api: Any, server: Server, engine: ScriptedEngine) -> None:
    engine.script = text_script(CALL)
    first = api.create(
        input=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": "weather?"}], tools=[WEATHER]
    )
    call = first.output[-1]
    engine.script = text_script("Rain")
    second = api.create(
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}],
        previous_response_id=first.id,
        tools=[WEATHER],
    )
    items = list(api.input_items.list(second.id, order="asc"))
    told = [(i.type, getattr(i, "role", None) or i.call_id) for i in items]
    assert told == [
        ("message", "system"),
        ("message", "user"),
        ("message", "assistant"),
        ("function_call", call.call_id),
        ("function_call_output", call.call_id),
    ]
    assert [items[0].content[0].text, items[1].content[0].text] == ["be brief", "weather?"]
    assert [i.model_dump(exclude={"created_by"}) for i in items[2:4]] == [i.model_dump() for i in first.output]
    assert items[4].output == "rain" and len({i.id for i in items}) == 5
    assert [i.id for i in api.input_items.list(first.id, order="asc")] == [i.id for i in items[:2]]
    assert [i.id for i in api.input_items.list(second.id)] == [i.id for i in items[::-1]]  # newest first, as OpenAI's


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_pages(api: Any, http: httpx.Client, limit: int, order: Any) -> None:
    words = [f"w{i}" for i in range(7)]
    made = api.create(input=[{"role": "assistant" if i % 2 else "user", "content": w} for i, w in enumerate(words)])
    found = list(api.input_items.list(made.id, limit=limit, order=order))  # the client turns the pages itself
    assert [i.content[0].text for i in found] == (words if order == "asc" else words[::-1])
    page = http.get(f"/v1/responses/{made.id}/input_items", params={"limit": limit, "order": order}).json()
    ItemList.model_validate(page)
    assert (len(page["data"]), page["has_more"]) == (min(limit, 7), limit < 7)
    assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
    for taken in range(1, 7):
        query = {"limit": limit, "order": order, "after": found[taken - 1].id}
        page = http.get(f"/v1/responses/{made.id}/input_items", params=query).json()
        assert [i["id"] for i in page["data"]] == [i.id for i in found[taken : taken + limit]]
        assert page["has_more"] == (taken + limit < 7)
    end = http.get(f"/v1/responses/{made.id}/input_items", params={"order": order, "after": found[-1].id}).json()
    assert end == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


def test_a_wrong_page_is_refused(api: Any, http: httpx.Client) -> None:
    made = api.create(input="x")
    url = f"/v1/responses/{made.id}/input_items"
    for param, value in (("limit", "0"), ("limit", "101"), ("limit", "x"), ("order", "up"), ("after", "msg_no")):
        refused(http.get(url, params={param: value}), param)
    refused(http.get(url, params={"include": "x"}), "include")
    assert http.get(url, params={"before": "x"}).json()["error"]["param"] == "before"
    assert http.get(f"/v1/responses/resp_{'0' * 64}/input_items").status_code == 404
    assert http.post(url).status_code == 405 and http.post(url).headers["allow"] == "GET, HEAD"
    allowed = http.put(f"/v1/responses/{made.id}").headers["allow"]
    assert allowed == "DELETE, GET, HEAD"


def test_responses_are_no_chats_unless_asked_for(api: Any, http: httpx.Client) -> None:
    made = api.create(input="x")
    chat = http.post("/v1/sessions", json={}).json()

    def listed(**query: str) -> dict[str, str]:
        found = http.get("/v1/sessions", params={"limit": "200", **query}).json()["data"]
        return {s["id"]: s["kind"] for s in found}

    assert chat["kind"] == "chat" and listed()[session_of(made.id)] == "response"
    assert chat["id"] in listed(kind="chat") and set(listed(kind="chat").values()) == {"chat"}
    assert session_of(made.id) in listed(kind="response") and set(listed(kind="response").values()) == {"response"}
    refused(http.get("/v1/sessions?kind=x"), "kind")
    # Whoever wants one as a chat makes a fork of it.
    url = f"/v1/sessions/{session_of(made.id)}"
    answer = http.get(url).json()["messages"][-1]["id"]
    assert http.post(f"{url}/fork", json={"message_id": answer}).json()["id"] in listed(kind="chat")
