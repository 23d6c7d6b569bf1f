"""What a new turn of a session says, before anything is done about it: its messages, its prompt, its parameters.

Nothing here changes anything: a request that is refused for what it says must not have ended the turn that was running.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from chatsvc.api.responses_delete import visible
from chatsvc.api.sampling import refuse_hopeless, room_for, sampling_params
from chatsvc.api.services import Services
from chatsvc.api.sessions_schema import MessageRequest, RegenerateRequest, TurnFields
from chatsvc.errors import InvalidRequest, NotFound
from chatsvc.scheduler.params import SamplingParams
from chatsvc.sessions.base import Message, Session
from chatsvc.sessions.codec import new_id

ROOT = "root"


@dataclass(frozen=True, slots=True)
class Plan:
    """Attributes:
    new: the messages to append; the last is the answer.
    ids: the prompt.
    params: without a seed yet; drawing one counts.
    """

    new: list[Message]
    ids: list[int]
    params: SamplingParams


class Planner:
    """Both ways to a new answer. A session may have a running answer: then its text so far is the history's.

    Both raise: NotFound, InvalidRequest, ContextLengthExceeded.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def message(self, session: Session, body: MessageRequest) -> Plan:
        """A user's message and its answer."""
        session = visible(session)
        parent = _parent(session, body.parent_id)
        user = _message(parent, "user", body.content)
        answer = replace(_message(user.id, "assistant", ""), status="running")
        return await self._plan(session, [user, answer], [*path_to(session, parent), user], body)

    async def regenerate(self, session: Session, leaf: str, body: RegenerateRequest) -> Plan:
        """Another answer in place of ``leaf`` or to it, or the rest of it."""
        path = path_to(visible(session), leaf, param="id")
        answer = replace(_message(path[-1].id, "assistant", ""), status="running")
        if body.continue_final_message:
            cut = path[-1] = self._cut(path[-1])
            answer = replace(answer, parent_id=cut.parent_id, content=cut.content, token_ids=cut.token_ids)
        elif path[-1].role == "assistant":
            path = path[:-1]
            answer.parent_id = path[-1].id
        return await self._plan(session, [answer], path, body, going_on=bool(body.continue_final_message))

    async def _plan(
        self,
        session: Session,
        new: list[Message],
        path: list[Message],
        body: TurnFields,
        *,
        going_on: bool = False,
    ) -> Plan:
        services = self._services
        ids = await self._prompt(session, path, going_on)
        newer = body.max_completion_tokens is not None
        max_tokens = room_for(
            len(ids),
            body.max_completion_tokens if newer else body.max_tokens,
            services.engine.limit,
            prompt_param="content",
            max_param="max_completion_tokens" if newer else "max_tokens",
        )
        params = sampling_params(
            body,
            max_tokens=max_tokens,
            logprobs=None,
            vocab_size=services.engine.capacity.vocab_size,
            max_n=services.settings.max_n,
            seed=0,
        )
        return Plan(new, ids, params)

    def _cut(self, message: Message) -> Message:
        """An answer to go on with. Without its ids when they do not say what its text says: one that was cut inside a
        character, or that lost text, goes on from the text.

        Raises: InvalidRequest when it is none, or came to its own end.
        """
        problem = None
        if message.role != "assistant" or not message.content:
            problem = "has to be an answer that has text"
        elif message.status == "done" and message.finish_reason != "length":
            problem = "this answer has come to its own end"
        if problem:
            raise InvalidRequest(f"continue_final_message: {problem}", param="continue_final_message")
        exact = self._services.tokenizer.decode(message.token_ids, skip_special=False) == message.content
        return message if exact else replace(message, token_ids=[])

    async def _prompt(self, session: Session, path: list[Message], going_on: bool) -> list[int]:
        services = self._services
        if services.template is None:
            raise InvalidRequest("This model has no chat template, so it has no sessions", code="no_chat_template")
        messages: list[dict[str, Any]] = []
        if session.system:
            messages.append({"role": "system", "content": session.system})
        first = len(messages)
        messages += [{"role": m.role, "content": m.content} for m in path]
        stored = {first + i: m.token_ids for i, m in enumerate(path) if m.role == "assistant" and m.token_ids}
        characters = sum(len(m["content"].strip()) for m in messages)
        refuse_hopeless(characters, services.longest_token, services.engine.limit, "content")
        return await services.offload(
            characters + 100 * len(messages),
            services.template.encode,
            messages,
            services.tokenizer,
            add_generation_prompt=not going_on,
            continue_final_message=going_on,
            assistant_ids=stored,
        )


def _message(parent_id: str | None, role: str, content: str) -> Message:
    return Message(new_id("msg"), parent_id, "user" if role == "user" else "assistant", content, created_at=time.time())


def _parent(session: Session, asked: str | None) -> str | None:
    """The answer that a new user message follows; None: it is a root."""
    if asked == ROOT or (asked is None and not session.messages):
        return None
    if asked is None:
        parent = session.messages[-1]
    else:
        found = next((m for m in session.messages if m.id == asked), None)
        if found is None:
            raise InvalidRequest("parent_id: there is no such message in this session", param="parent_id")
        parent = found
    require_answer(parent, "parent_id")
    return parent.id


def require_answer(message: Message, param: str) -> None:
    """Users and answers take turns: nothing but an answer is followed by a user's message."""
    if message.role != "assistant":
        raise InvalidRequest(
            f"{param}: has to be an answer, not a user's message (which POST .../regenerate would answer)", param=param
        )


def path_to(session: Session, leaf: str | None, param: str | None = None) -> list[Message]:
    """The messages from the root to ``leaf``. Raises: NotFound."""
    by_id = {m.id: m for m in session.messages}
    path: list[Message] = []
    while leaf is not None:
        message = by_id.pop(leaf, None)
        if message is None:
            raise NotFound("There is no such message in this session", param=param, code="message_not_found")
        path.append(message)
        leaf = message.parent_id
    return path[::-1]
