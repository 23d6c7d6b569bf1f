"""Where the parts of a request are told, when somebody collects traces. The collector's library is optional."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Protocol, cast

from chatsvc.engine.output import Generation
from chatsvc.errors import ConfigError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing(Protocol):
    def ended(self, traceparent: str, request_id: str, generation: Generation) -> None:
        """A generation has ended. Quick, never raises.

        Args:
            traceparent: the header of the HTTP request, if it was sane, else "".
            request_id: the caller's name of that request.
        """
        ...

    def close(self) -> None:
        """Send what is left; may take some seconds."""
        ...


class NoTracing:
    """Nobody collects."""

    def ended(self, traceparent: str, request_id: str, generation: Generation) -> None: ...

    def close(self) -> None: ...


def make_tracing(environ: Mapping[str, str] = os.environ) -> Tracing:
    """OpenTelemetry spans when the environment names a collector, as every OpenTelemetry program reads it.

    Raises: ConfigError when it does and the library is not installed.
    """
    asked = next((name for name in ENDPOINTS if environ.get(name)), None)
    if asked is None:
        return NoTracing()
    try:
        module = importlib.import_module("chatsvc.api.otel")
    except ModuleNotFoundError as e:
        raise ConfigError(f"{asked} asks for traces, but {e.name} is not installed: pip install 'chatsvc[otel]'") from e
    return cast(Tracing, module.exporting())
