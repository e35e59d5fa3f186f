"""What an engine counts, as families of Prometheus: checkpoints of states, experts, images, and its replicas. Of a
model without these nothing."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quengine.block_manager import CheckpointCounts
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.request.feature_cache import ImageCounts
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


Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def _by_memory(kind: type[Family], name: str, about: str, **counts: float) -> Family:
    """A family labelled by memory, with a sample for each."""
    family = kind(name, about, labels=["memory"])
    for memory, count in counts.items():
        family.add_metric([memory], count)
    return family


class CheckpointMetrics:
    """Families by memory: "device" and "host". `read` gives the counts. Called in the event loop."""

    def __init__(self, read: Callable[[], CheckpointCounts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        yield _by_memory(
            GaugeMetricFamily,
            "quengine_state_checkpoints",
            "Copies of states that prompts may go on from, by the memory that they are in.",
            device=counts.on_device,
            host=counts.in_host,
        )
        yield _by_memory(
            CounterMetricFamily,
            "quengine_state_checkpoints_moved",
            "Copies of states that were moved between the device and host memory, by where they were moved to.",
            host=counts.to_host,
            device=counts.from_host,
        )


class ExpertMetrics:
    """Families by memory: "device" and "host". `read` gives the counts. Called in the event loop."""

    def __init__(self, read: Callable[[], ExpertCounts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        yield _by_memory(
            GaugeMetricFamily,
            "quengine_experts",
            "Experts of layers whose experts are in host memory: those that the device holds, and the others.",
            device=counts.on_device,
            host=counts.in_host,
        )
        yield _by_memory(
            CounterMetricFamily,
            "quengine_expert_uses",
            "Rows times experts that computed them, by the memory that the expert was in.",
            device=counts.device_uses,
            host=counts.host_uses,
        )


class ImageMetrics:
    """Families of the encoder and of what is kept. `read` gives the counts. Called in the event loop."""

    def __init__(self, read: Callable[[], ImageCounts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        yield CounterMetricFamily(
            "quengine_images_encoded", "Images that the encoder computed.", value=counts.encoded
        )
        yield CounterMetricFamily(
            "quengine_image_batches", "Batches of images that the encoder computed.", value=counts.batches
        )
        yield CounterMetricFamily(
            "quengine_images_found",
            "Images of prompts that were kept encoded, or on their way for another request.",
            value=counts.found,
        )
        yield GaugeMetricFamily("quengine_images_kept", "Images that are kept encoded.", value=counts.kept)
        yield GaugeMetricFamily(
            "quengine_image_cache_bytes",
            "Bytes of the images that are kept encoded.",
            value=counts.kept_bytes,
        )
        yield GaugeMetricFamily(
            "quengine_image_device_bytes",
            "Bytes of those of them that are in the device's memory.",
            value=counts.device_bytes,
        )


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
