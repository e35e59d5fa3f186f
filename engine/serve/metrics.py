"""Counters, times and gauges of the server and of each of its models, for Prometheus."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from quengine.request.output import DraftCounts
from quengine.serve.engine_metrics import EngineMetrics
from quengine.serve.llama_metrics import LlamaMetrics
from quengine.serve.processes.server_thread import Worker
from quengine.serve.processes.shared_engine import Event, Failed, Finished, Piece

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    """The metrics of the server itself. All of it is called in the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        labels = ("path", "status")
        self._http = Counter(
            "quengine_http_requests", "Answers by path and HTTP status.", labels, registry=self.registry
        )
        self._ignored = Counter(
            "quengine_ignored_fields", "Unknown fields of bodies, passed over.", registry=self.registry
        )
        self._shortened = Counter(
            "quengine_shortened_prompts", "Prompts that were cut to fit the context.", registry=self.registry
        )

    def answered(self, path: str, status: int, ignored: int, shortened: int) -> None:
        """Counts an answer, the ignored fields of its request's body, and its shortened prompts."""
        self._http.labels(path, str(status)).inc()
        self._ignored.inc(ignored)
        self._shortened.inc(shortened)

    def text(self, models: "Mapping[str, Metrics]") -> bytes:
        """Prometheus' text, with the metrics of the models under the label `model`."""
        labelled = CollectorRegistry()
        labelled.register(_Labelled(models))  # type: ignore[arg-type]  # all that is asked of it is `collect`
        return generate_latest(self.registry) + generate_latest(labelled)


class _Labelled:
    """The families of several registries as one, each sample with its model's name."""

    def __init__(self, models: "Mapping[str, Metrics]") -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for name, metrics in self._models.items():
            for family in metrics.registry.collect():
                joined = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    joined.samples.append(sample._replace(labels={**sample.labels, "model": name}))
        yield from families.values()


class Metrics:
    """The metrics of a model. All of it is called in the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.llama = LlamaMetrics()
        labels = ("reason",)
        self._ended = Counter(
            "quengine_texts", "Completions by how they ended.", labels, registry=self.registry
        )
        self._prompt = self._counter("prompt_tokens", "Prompt tokens of finished completions.")
        self._cached = self._counter("prompt_tokens_cached", "Of these, taken from the cache.")
        self._generated = self._counter("generated_tokens", "Tokens generated.")
        self._violations = self._counter(
            "schema_violations", "Finished answers that are not valid under their JSON schema."
        )
        self._drafts = self._counter("draft_steps", "Steps that checked drafted tokens.")
        self._drafted = self._counter("drafted_tokens", "Tokens drafted.")
        self._accepted = self._counter("accepted_tokens", "Drafted tokens that were accepted.")
        self._sums = DraftCounts()
        self.gauge("accept_rate", "Accepted tokens a drafted one.", lambda: self._sums.accept_rate or 0.0)
        self.gauge("accept_length", "Tokens a step with a draft.", lambda: self._sums.accept_length or 0.0)
        self._ttft = self._histogram("time_to_first_token_seconds", "From request to first token.", _SECONDS)
        self._token = self._histogram(
            "time_per_token_seconds", "Mean time of a completion's later tokens.", _TOKEN_SECONDS
        )

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"quengine_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"quengine_{name}", text, registry=self.registry, buckets=buckets)

    def gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        """A number that is read when the metrics are."""
        Gauge(f"quengine_{name}", text, registry=self.registry).set_function(value)

    def add(self, families: EngineMetrics) -> None:
        """Families that are made when the metrics are read."""
        self.registry.register(families)  # type: ignore[arg-type]  # all that is asked of it is `collect`

    def observe(self, events: Sequence[Event]) -> None:
        """Counts the events of a step."""
        tokens = sum(len(event.tokens) for event in events if isinstance(event, Piece))
        tokens += sum(event.timings.end_tokens for event in events if isinstance(event, Finished))
        self._generated.inc(tokens)
        self.llama.generated(tokens)
        for event in events:
            if isinstance(event, Failed):
                self._ended.labels("error").inc()
            elif isinstance(event, Finished):
                self.llama.finished(event)
                self._finished(event)

    def _finished(self, event: Finished) -> None:
        times = event.timings
        self._ended.labels(event.reason).inc()
        self._prompt.inc(times.prompt_tokens)
        self._cached.inc(times.cached_tokens)
        self._drafts.inc(times.drafts)
        self._drafted.inc(times.drafted_tokens)
        self._accepted.inc(times.accepted_tokens)
        self._sums += times.draft_counts
        self._ttft.observe(times.ttft_s)
        if times.generated_tokens > 1:
            self._token.observe(times.decode_s / (times.generated_tokens - 1))

    def violated(self) -> None:
        """Counts a finished answer that is not valid under its schema."""
        self._violations.inc()

    def cancelled(self, completions: int) -> None:
        self._ended.labels("cancelled").inc(completions)

    def text(self, worker: Worker) -> bytes:
        """Prometheus' text: first under names of our own, then under llama-server's."""
        return generate_latest(self.registry) + self.llama.text(worker)
