"""Traces for OpenTelemetry (`--otlp-endpoint`): a span for each request, and within it one up to the first token and
one from there to the last. A request's W3C `traceparent` is their parent, and says whether they are sampled.

Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI. This module is imported
only with the flag; the exporter takes its other settings (headers, service name) from OpenTelemetry's environment
variables.
"""

import os
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quengine.errors import EngineError
from quengine.serve import access_log
from quengine.serve.access_log import POLLED_PATHS, RequestRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Tracer

_PATH = "/v1/traces"


class Traced:
    """The outermost middleware: sends the spans of each request once it has been answered."""

    def __init__(self, app: ASGIApp, provider: "TracerProvider") -> None:
        self.app = app
        self._tracer = provider.get_tracer("quengine")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in POLLED_PATHS:
            await self.app(scope, receive, send)
            return
        status = 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        began = time.perf_counter()
        try:
            await self.app(scope, receive, noting_send)
        finally:
            record = access_log.current()
            _spans(self._tracer, record if record.scope else RequestRecord(scope, began), status)


def provider_for(endpoint: str) -> "TracerProvider":
    """The provider that sends spans to a collector, by OTLP over HTTP, from a thread of its own.

    Raises:
        EngineError: `endpoint` is no http(s) address, or the packages are missing.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise EngineError(
            f"--otlp-endpoint {endpoint}: must be an address such as http://127.0.0.1:4318, of a collector"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise EngineError(
            f"--otlp-endpoint needs OpenTelemetry ({error}): pip install 'quengine[otel]'"
        ) from None
    name = os.environ.get("OTEL_SERVICE_NAME", "quengine")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    address = endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=address)))
    return provider


def _spans(tracer: "Tracer", record: RequestRecord, status: int) -> None:
    """The request's span from its first byte to its end, and within it those of its tokens."""
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    offset = time.time() - time.perf_counter()

    def at(moment: float) -> int:
        """Nanoseconds since the epoch of a `perf_counter` time."""
        return int((moment + offset) * 1e9)

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in record.scope["headers"]}
    request = tracer.start_span(
        f"{record.scope['method']} {record.scope['path']}",
        TraceContextTextMapPropagator().extract(headers),
        SpanKind.SERVER,
        _attributes(record, status),
        start_time=at(record.began),
    )
    if request.is_recording():
        within = set_span_in_context(request)
        parts = (
            ("first token", record.began, record.first_token),
            ("last token", record.first_token, record.last_token),
        )
        for name, begin, end in parts:
            if begin is not None and end is not None:
                tracer.start_span(name, within, start_time=at(begin)).end(at(end))
        # By the conventions a 4xx is no server error. Messages may quote the request, so they are only in the log.
        if status >= 500 or (record.error and 0 < status < 400):
            request.set_status(Status(StatusCode.ERROR))
    request.end()


def _attributes(record: RequestRecord, status: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "http.request.method": record.scope["method"],
        "url.path": record.scope["path"],
        "http.response.status_code": status or access_log.CLIENT_GONE,
    }
    if record.prompt_tokens is not None:
        found |= {
            "gen_ai.request.model": record.model,
            "gen_ai.usage.input_tokens": record.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.usage.output_tokens": record.completion_tokens,
        }
    return found
