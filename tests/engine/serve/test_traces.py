"""Traces: spans of requests and their tokens, below the trace that a client names, sent to a collector."""

import gzip
import subprocess
import sys
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from quengine.errors import EngineError
from quengine.serve import traces
from tests.engine.serve.fake_engine import FAILING_PROMPT
from tests.engine.serve.serving import Served, serving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def spans_of(served: Served, exporter: InMemorySpanExporter, count: int) -> Sequence[ReadableSpan]:
    """Those of the requests so far: they are made after an answer."""
    assert served.wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    found = exporter.get_finished_spans()
    exporter.clear()
    return found


def test_a_request_has_spans_to_its_first_and_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(traces, "provider_for", lambda _: provider)
    with serving(settings={"otlp_endpoint": "http://collector"}) as served, served.http() as client:
        body: dict[str, Any] = {"prompt": "four", "max_tokens": 5}
        for stream in (False, True):
            client.post(
                "/v1/completions",
                json={**body, "stream": stream},
                headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
            ).raise_for_status()
            first, last, request = spans_of(served, exporter, 3)
            assert (first.name, last.name) == ("first token", "last token")
            assert request.name == "POST /v1/completions"
            assert request.parent is not None and f"{request.parent.span_id:016x}" == PARENT
            assert f"{request.context.trace_id:032x}" == TRACE
            for part in (first, last):
                assert part.parent is not None and part.parent.span_id == request.context.span_id
            times = (request.start_time, first.start_time, first.end_time, last.end_time, request.end_time)
            assert all(times) and list(times) == sorted(times)  # type: ignore[type-var]
            assert first.end_time == last.start_time
            said = dict(request.attributes or {})
            assert said["gen_ai.usage.output_tokens"] == 5 and said["gen_ai.request.model"] == "fake"
            assert said["gen_ai.usage.input_tokens"] == 4 and said["http.response.status_code"] == 200

        client.post("/v1/completions", json={"prompt": "a", "seed": "a secret"})
        (wrong,) = spans_of(served, exporter, 1)
        assert wrong.parent is None and wrong.status.is_unset and "secret" not in wrong.to_json()
        assert dict(wrong.attributes or {})["http.response.status_code"] == 400
        client.post("/v1/completions", json={"prompt": FAILING_PROMPT})
        *_, failed = spans_of(served, exporter, 1)
        assert failed.status.status_code is StatusCode.ERROR

        client.get("/health")
        unsampled = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        client.post("/v1/completions", json=body, headers=unsampled).raise_for_status()
        client.get("/v1/models")
        assert [span.name for span in spans_of(served, exporter, 1)] == ["GET /v1/models"]


class Collector(BaseHTTPRequestHandler):
    """Keeps what is posted to it."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.taken.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


def test_spans_reach_a_collector() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector: Any = HTTPServer(("127.0.0.1", 0), Collector)
    collector.taken = []
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    provider = traces.provider_for(f"http://127.0.0.1:{collector.server_port}")
    provider.get_tracer("test").start_span("a span").end()
    provider.shutdown()
    collector.shutdown()
    ((path, body),) = collector.taken
    assert path == "/v1/traces"
    (of_service,) = ExportTraceServiceRequest.FromString(body).resource_spans
    assert "quengine" in {each.value.string_value for each in of_service.resource.attributes}
    assert of_service.scope_spans[0].spans[0].name == "a span"


def test_what_is_no_address_is_a_line() -> None:
    with pytest.raises(
        EngineError, match=r"--otlp-endpoint localhost:4318: must be an address such as http://"
    ):
        traces.provider_for("localhost:4318")


def test_nothing_of_it_is_imported_without_the_flag() -> None:
    program = (
        "import sys, quengine.serve.server, quengine.serve.app;"
        "print([name for name in sys.modules if name.startswith('opentelemetry') or name.endswith('.traces')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
