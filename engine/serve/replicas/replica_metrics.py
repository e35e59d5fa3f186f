"""Server process: the numbers of each replica for Prometheus, under the label `replica`. Without replicas nothing."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quengine.serve.processes.shared_engine import ReplicaStats

_GAUGES = {
    "up": "Whether the replica takes requests.",
    "running": "Requests that the replica has.",
    "cache_used": "Positions in the replica's cache.",
    "cache_size": "Positions that the replica's cache has.",
}
_COUNTERS = {
    "requests": "Requests given to the replica.",
    "moved": "Requests that went on to another replica.",
    "prompt_tokens": "Tokens of the prompts of finished requests.",
    "cached_tokens": "Those of them that were in the replica's cache.",
    "generated_tokens": "Tokens of finished answers.",
    "failures": "How often the replica had to be started again.",
}


class ReplicaMetrics:
    """Families with a sample for each replica; `read` gives them by number. Called in the event loop."""

    def __init__(self, read: Callable[[], Sequence[ReplicaStats]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        replicas = self._read()
        if not replicas:
            return
        for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, about in names.items():
                family = kind(f"quengine_replica_{name}", about, labels=["replica"])
                for number, stats in enumerate(replicas):
                    family.add_metric([str(number)], float(getattr(stats, name)))
                yield family
