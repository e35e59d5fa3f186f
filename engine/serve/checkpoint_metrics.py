"""Checkpoints of recurrent states for Prometheus: where they are, and how many were moved. Of other models nothing."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quengine.block_manager import CheckpointCounts


class CheckpointMetrics:
    """Families by memory: "device" and "host". `read` gives the counts. Called in the event loop."""

    def __init__(self, read: Callable[[], CheckpointCounts | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        counts = self._read()
        if counts is None:
            return
        held = GaugeMetricFamily(
            "quengine_state_checkpoints",
            "Copies of states that prompts may go on from, by the memory that they are in.",
            labels=["memory"],
        )
        held.add_metric(["device"], counts.on_device)
        held.add_metric(["host"], counts.in_host)
        moved = CounterMetricFamily(
            "quengine_state_checkpoints_moved",
            "Copies of states that were moved between the device and host memory, by where they were moved to.",
            labels=["memory"],
        )
        moved.add_metric(["host"], counts.to_host)
        moved.add_metric(["device"], counts.from_host)
        yield from (held, moved)
