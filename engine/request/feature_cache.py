"""Images that are kept encoded, by the hash of their files, the least recently used of which make room."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from quengine.request.prompt_images import Features


@dataclass(frozen=True, eq=False)
class EncodedImage:
    """An image's features, fp32 [rows, embedding length] in host memory, and the part of a prompt that it takes."""

    features: Features
    layout: tuple[str | int, ...]

    @property
    def nbytes(self) -> int:
        return self.features.values.nbytes


class ImageCounts(NamedTuple):
    """Images of prompts so far: encoded, in batches, and found kept or on their way for another request; and the images
    that are kept now, with their bytes in host memory."""

    encoded: int = 0
    batches: int = 0
    found: int = 0
    kept: int = 0
    kept_bytes: int = 0


class FeatureCache:
    """At most `most_bytes` of images. The caller holds a lock.

    Attributes:
        nbytes: of the images that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self.nbytes = most_bytes, 0
        self._images = OrderedDict[bytes, EncodedImage]()

    def __len__(self) -> int:
        return len(self._images)

    def get(self, name: bytes) -> EncodedImage | None:
        image = self._images.get(name)
        if image is not None:
            self._images.move_to_end(name)
        return image

    def add(self, name: bytes, image: EncodedImage) -> None:
        """Keep an image in place of those used longest ago; one that is larger than all room makes none."""
        if image.nbytes > self._most:
            return
        if name in self._images:
            self.nbytes -= self._images.pop(name).nbytes
        self._images[name] = image
        self.nbytes += image.nbytes
        while self.nbytes > self._most:
            _, oldest = self._images.popitem(last=False)
            self.nbytes -= oldest.nbytes
