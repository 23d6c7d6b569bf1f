"""OpenTelemetry spans of a request: ``generate``, and in it ``queue``, ``prefill`` and ``decode``.

They are made when the generation has ended, from the times it has anyway, so nothing is added to a step. The one place
that imports OpenTelemetry; see :func:`chatsvc.api.tracing.make_tracing`. The usual ``OTEL_*`` variables are the
library's own: endpoint, headers, service name, sampler.
"""

from __future__ import annotations

import logging
import os
import time

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from chatsvc import __version__
from chatsvc.engine.output import Generation

log = logging.getLogger("chatsvc.api")


class Spans:
    """Implements :class:`chatsvc.api.tracing.Tracing`."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("chatsvc", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def ended(self, traceparent: str, request_id: str, generation: Generation) -> None:
        """See the protocol."""
        try:
            self._tell(traceparent, request_id, generation)
        except Exception:
            log.exception("the spans of %s could not be made", generation.request_id)

    def _tell(self, traceparent: str, request_id: str, generation: Generation) -> None:
        at, logs = generation.timings, generation.logs
        epoch = time.time_ns() - time.perf_counter_ns()

        def ns(seconds: float) -> int:
            return epoch + int(seconds * 1e9)

        end = at.finished if at.finished is not None else time.perf_counter()
        parent = self._propagator.extract({"traceparent": traceparent} if traceparent else {})
        span = self._tracer.start_span(
            "generate",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.response.id": generation.request_id,
                "gen_ai.usage.input_tokens": len(generation.prompt_token_ids),
                "gen_ai.usage.output_tokens": generation.num_output_tokens,
                "gen_ai.response.finish_reasons": [choice.finish_reason or "" for choice in logs],
                "chatsvc.request_id": request_id,
                "chatsvc.cached_tokens": generation.num_cached_tokens,
            },
            start_time=ns(at.arrival),
        )
        inside = set_span_in_context(span)
        parts = (
            ("queue", at.arrival, at.scheduled),
            ("prefill", at.scheduled, at.first_token),
            ("decode", at.first_token, end),
        )
        for name, start, stop in parts:
            if start is not None:  # what was cut off ended with the whole
                self._tracer.start_span(name, inside, start_time=ns(start)).end(ns(end if stop is None else stop))
        errors = [choice.error for choice in logs if choice.finish_reason == "error"]
        if errors:
            span.set_status(Status(StatusCode.ERROR, errors[0]))
        span.end(ns(end))

    def close(self) -> None:
        """See the protocol."""
        self._provider.shutdown()


def exporting() -> Spans:
    """Spans that go to the collector named by the environment, in batches, from a thread."""
    name = {} if "OTEL_SERVICE_NAME" in os.environ else {"service.name": "chatsvc"}
    provider = TracerProvider(resource=Resource.create(name), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)
