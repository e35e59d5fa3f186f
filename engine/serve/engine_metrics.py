"""Counts of an engine as Prometheus families: checkpoints of states, experts, images, and its replicas. An engine
without one of these gives no family for it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quengine.block_manager import CheckpointCounts
from quengine.kernels.moe.expert_counts import ExpertCounts
from quengine.request.feature_cache import ImageCounts
from quengine.serve.processes.shared_engine import EngineStats, ReplicaStats

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


class EngineMetrics:
    """The families of an engine whose statistics `read` gives. Called in the event loop."""

    def __init__(self, read: Callable[[], EngineStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        yield from _replicas((*stats.replicas, *stats.prefill))
        if stats.checkpoints is not None:
            yield from _checkpoints(stats.checkpoints)
        if stats.experts is not None:
            yield from _experts(stats.experts)
        if stats.images is not None:
            yield from _images(stats.images)


def _replicas(replicas: Sequence[ReplicaStats]) -> Iterator[Metric]:
    """Families with a sample for each replica, by its number."""
    for kind, names in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, about in names.items() if replicas else ():
            family = kind(f"quengine_replica_{name}", about, labels=["replica"])
            for number, stats in enumerate(replicas):
                family.add_metric([str(number)], float(getattr(stats, name)))
            yield family


def _checkpoints(counts: CheckpointCounts) -> Iterator[Metric]:
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


def _experts(counts: ExpertCounts) -> Iterator[Metric]:
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


def _images(counts: ImageCounts) -> Iterator[Metric]:
    for kind, name, about, value in (
        (CounterMetricFamily, "images_encoded", "Images that the encoder computed.", counts.encoded),
        (
            CounterMetricFamily,
            "image_batches",
            "Batches of images that the encoder computed.",
            counts.batches,
        ),
        (
            CounterMetricFamily,
            "images_found",
            "Images of prompts that were kept encoded, or on their way for another request.",
            counts.found,
        ),
        (GaugeMetricFamily, "images_kept", "Images that are kept encoded.", counts.kept),
        (
            GaugeMetricFamily,
            "image_cache_bytes",
            "Bytes of the images that are kept encoded.",
            counts.kept_bytes,
        ),
        (
            GaugeMetricFamily,
            "image_device_bytes",
            "Bytes of those of them that are in the device's memory.",
            counts.device_bytes,
        ),
    ):
        yield kind(f"quengine_{name}", about, value=value)
