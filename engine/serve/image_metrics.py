"""Images of prompts for Prometheus: how many were encoded, and how many were found kept. Of other models nothing."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quengine.request.feature_cache import ImageCounts


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
