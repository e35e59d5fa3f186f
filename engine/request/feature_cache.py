"""A cache of encoded images in two tiers, by the hash of their files: the least recently used images move from the
device's memory to the host's, and are dropped from there."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from quengine.request.prompt_images import Features


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image's features, and its part of a prompt: texts, and numbers of rows."""

    features: Features
    layout: tuple[str | int, ...]

    @property
    def nbytes(self) -> int:
        return self.features.values.nbytes


class ImageCounts(NamedTuple):
    """Counts of a model's images.

    encoded: images encoded so far, in `batches` batches. found: images of prompts so far that were in the cache, or
    were being encoded for another request. kept: images in the cache now, of `kept_bytes` bytes, `device_bytes` of them
    on the device.
    """

    encoded: int = 0
    batches: int = 0
    found: int = 0
    kept: int = 0
    kept_bytes: int = 0
    device_bytes: int = 0


class _Tier:
    """The images in one memory, least recently used first; at most `most` bytes."""

    def __init__(self, most: int) -> None:
        self.most, self.nbytes = most, 0
        self.images = OrderedDict[bytes, EncodedImage]()

    def get(self, name: bytes) -> EncodedImage | None:
        image = self.images.get(name)
        if image is not None:
            self.images.move_to_end(name)
        return image

    def add(self, name: bytes, image: EncodedImage) -> None:
        self.images[name] = image
        self.nbytes += image.nbytes

    def remove(self, name: bytes) -> None:
        if name in self.images:
            self.nbytes -= self.images.pop(name).nbytes

    def excess(self) -> "list[tuple[bytes, EncodedImage]]":
        """Removes the images used longest ago that are beyond the limit."""
        found = list[tuple[bytes, EncodedImage]]()
        while self.nbytes > self.most:
            found.append(self.images.popitem(last=False))
            self.nbytes -= found[-1][1].nbytes
        return found


class FeatureCache:
    """At most `device_bytes` of images on the encoder's device and `host_bytes` in host memory. The caller holds a
    lock."""

    def __init__(self, host_bytes: int, device_bytes: int = 0) -> None:
        self._host, self._device = _Tier(host_bytes), _Tier(device_bytes)

    def __len__(self) -> int:
        return len(self._host.images) + len(self._device.images)

    @property
    def nbytes(self) -> int:
        """Bytes of all images in the cache."""
        return self._host.nbytes + self._device.nbytes

    @property
    def device_bytes(self) -> int:
        return self._device.nbytes

    def get(self, name: bytes) -> EncodedImage | None:
        return self._device.get(name) or self._host.get(name)

    def add(self, name: bytes, image: EncodedImage) -> None:
        """Adds an image; the least recently used ones make room. An image larger than the whole tier displaces none."""
        for tier in (self._device, self._host):
            tier.remove(name)
        if image.features.on_device and image.nbytes <= self._device.most:
            self._device.add(name, image)
            for oldest, moved in self._device.excess():
                self._add_to_host(oldest, moved)
        else:
            self._add_to_host(name, image)

    def _add_to_host(self, name: bytes, image: EncodedImage) -> None:
        if image.features.on_device:  # else prompts that have the image would hold the device's memory
            image.features.to_host()
        if image.nbytes <= self._host.most:
            self._host.add(name, image)
            self._host.excess()
