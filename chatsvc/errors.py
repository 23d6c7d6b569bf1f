"""Every exception that crosses a floor of chatsvc.

::

    ChatsvcError
    ├── ConfigError                 a flag, a file or the machine does not allow a start; the message has the numbers
    ├── ModelError                  a model cannot be served (unknown field, missing tensor, wrong shape)
    ├── RequestError                the caller's fault; becomes HTTP 4xx and names the field
    │   ├── InvalidRequest          400
    │   ├── ContextLengthExceeded   400, code context_length_exceeded
    │   ├── NotFound                404
    │   └── Conflict                409
    ├── Overloaded                  the queue is full or the wait was too long; becomes HTTP 429 or 503 with Retry-After
    ├── EngineError                 one generation failed; the others go on
    ├── EngineDead                  the engine cannot go on; becomes HTTP 503
    └── StoreError                  the session store cannot answer; becomes HTTP 503
"""

from __future__ import annotations


class ChatsvcError(Exception):
    """Base of every exception that chatsvc raises on purpose."""


class ConfigError(ChatsvcError):
    """The service cannot start like this; the message says which setting to change."""


class ModelError(ChatsvcError):
    """The model cannot be served as it is; the message names the field, tensor or file."""


class RequestError(ChatsvcError):
    """The caller asked for something that cannot be done.

    Attributes:
        param: the request field that is wrong, or None.
        code: OpenAI's machine-readable code, or None.
        status: the HTTP status.
    """

    status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A field has a value that is not allowed."""


class ContextLengthExceeded(RequestError):
    """Prompt and answer do not fit into the context or the KV pool."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class NotFound(RequestError):
    """There is no such thing, or it is not the caller's."""

    status = 404


class Conflict(RequestError):
    """The thing is busy with something else."""

    status = 409


class Overloaded(ChatsvcError):
    """Not now. ``retry_after`` is in seconds; ``status`` is 429 (queue full) or 503 (draining, not ready)."""

    def __init__(self, message: str, *, retry_after: int = 1, status: int = 429) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.status = status


class EngineError(ChatsvcError):
    """One generation failed; the others go on."""


class EngineDead(ChatsvcError):
    """The engine stopped and will not answer any more."""


class StoreError(ChatsvcError):
    """The session store is away, full or slow. ``away``: it did not answer at all (it refuses nothing)."""

    def __init__(self, message: str, *, away: bool = False) -> None:
        super().__init__(message)
        self.away = away
