"""The one way from a request to the engine: as whom, on whose account, and who may stop it again."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

from chatsvc.api.kvfilter import OwnOnly
from chatsvc.api.middleware import RequestInfo
from chatsvc.engine.output import Generation
from chatsvc.engine.protocol import Engine
from chatsvc.scheduler.params import SamplingParams


class Desk:
    """Starts generations. Knows those that run, with their tenants.

    ``private``: tenants see nothing of each other.
    """

    def __init__(self, engine: Engine, *, private: bool) -> None:
        self._engine = engine
        self._private = private
        self._running: dict[str, tuple[str, Generation]] = {}

    def generate(
        self,
        info: RequestInfo,
        *,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        cache_salt: str = "",
        priority: int = 0,
    ) -> Generation:
        """Start a generation for the tenant of a request, within the quotas of its key.

        Raises: QuotaExceeded; what the engine raises, with nothing taken from the quotas.
        """
        ticket, size = info.ticket, len(prompt_token_ids)
        if ticket is not None:
            try:
                ticket.open(size)
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

        def look() -> None:
            if not generation.finished:
                return
            generation.unwatch(look)
            del self._running[request_id]
            if ticket is not None:
                begun = generation.timings.scheduled is not None
                ticket.close(size, generation.num_output_tokens, begun=begun)

        generation.watch(look)
        return generation

    def cancel(self, tenant: str, request_id: str) -> bool:
        """Stop one; False when nothing of that name runs for this tenant."""
        owner, generation = self._running.get(request_id, (None, None))
        if generation is None or owner != tenant:
            return False
        generation.cancel()
        return True

    async def kv_events(self, tenant: str) -> AsyncIterator[dict[str, Any]]:
        """The engine's block map and its changes, as this tenant may see them."""
        own = OwnOnly(lambda request_id: self._running.get(request_id, (None, None))[0] == tenant)
        async with aclosing(cast(AsyncGenerator[dict[str, Any], None], self._engine.kv_events())) as changes:
            async for change in changes:
                yield own(change) if self._private else change
