"""The one way from a request to the engine: as whom, on whose account, and who may stop it again."""

from __future__ import annotations

import asyncio
import re

from chatsvc.api.errors import seconds
from chatsvc.api.kvfilter import OwnOnly
from chatsvc.api.middleware import RequestInfo
from chatsvc.api.timings import told
from chatsvc.api.tracing import NoTracing, Tracing
from chatsvc.engine.checks import check_request
from chatsvc.engine.output import Generation
from chatsvc.engine.protocol import Engine
from chatsvc.errors import InvalidRequest
from chatsvc.scheduler.params import SamplingParams

_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{1,20})?")
MOST_SECONDS = 9_999_999


class Desk:
    """Starts generations. Knows those that run, with their tenants.

    Args:
        timeout: seconds that an answer may take, counted from the arrival of its request; None: as long as it takes.
        tracing: is told of every end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        timeout: float | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._tracing = tracing or NoTracing()
        self._timeout = timeout
        self._running: dict[str, tuple[str, Generation]] = {}

    def check(self, info: RequestInfo, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """What :meth:`generate` would refuse for what the request says; nothing is taken or started.

        Raises: InvalidRequest, ContextLengthExceeded.
        """
        asked_timeout(info.timeout)
        engine = self._engine
        check_request(prompt_token_ids, params, limit=engine.limit, vocab_size=engine.capacity.vocab_size)

    async def generate(
        self,
        info: RequestInfo,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Start a generation for the tenant of a request, within the quotas of its key and with its deadline.

        Raises: InvalidRequest (the header with the deadline); QuotaExceeded; what the engine raises, with nothing taken
            from the quotas.
        """
        limit = shorter(self._timeout, asked_timeout(info.timeout))
        ticket, size = info.ticket, len(prompt_token_ids)
        if ticket is not None:
            try:
                await ticket.enter(size)
            finally:
                info.headers.update(ticket.headers())
        try:
            generation = self._engine.generate(
                request_id=request_id,
                prompt_token_ids=prompt_token_ids,
                params=params,
                tenant=info.tenant,
                cache_salt=cache_salt,
                priority=priority,
            )
        except BaseException:
            if ticket is not None:
                ticket.refused(size)
                info.headers.update(ticket.headers())
            raise
        self._running[request_id] = (info.tenant, generation)
        timer = None if limit is None else _end_at(generation, info.started + limit, limit)

        def look() -> None:
            if not generation.finished:
                return
            generation.unwatch(look)
            if timer is not None:
                timer.cancel()
            del self._running[request_id]
            if ticket is not None:
                begun = generation.timings.scheduled is not None
                ticket.close(size, generation.num_output_tokens, begun=begun)
            info.fields.update(told([generation]))
            self._tracing.ended(info.trace, info.id, generation)

        generation.watch(look)
        return generation

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Stop one; False when nothing of that name runs for this tenant."""
        owner, generation = self._running.get(request_id, (None, None))
        if generation is None or owner != tenant:
            return False
        generation.cancel()
        return True

    def own_only(self, tenant: str) -> OwnOnly:
        """A filter for the engine's block map and its changes: what this tenant may see of them."""
        return OwnOnly(lambda request_id: self._running.get(request_id, (None, None))[0] == tenant)


def asked_timeout(header: str | None) -> float | None:
    """Seconds that the header ``X-Request-Timeout`` asks for. Raises: InvalidRequest."""
    if header is None:
        return None
    wanted = float(header) if _SECONDS.fullmatch(header := header.strip(" \t")) else 0.0
    if not 0 < wanted <= MOST_SECONDS:
        raise InvalidRequest(
            f"X-Request-Timeout: has to be a number of seconds above 0 and up to {MOST_SECONDS}, such as 30 or 2.5",
            param="X-Request-Timeout",
        )
    return wanted


def shorter(a: float | None, b: float | None) -> float | None:
    """The smaller one; None is none."""
    return min((x for x in (a, b) if x is not None), default=None)


def _end_at(generation: Generation, when: float, limit: float) -> asyncio.TimerHandle:
    """End it with an error at that time of the loop's clock; what it has until then stays readable."""
    words = f"The answer was not complete within {seconds(limit)}"
    return asyncio.get_running_loop().call_at(when, generation.cancel, words, 408)
