"""Which encoded images are kept, and in which memory."""

import pytest
import torch

from quengine.kernels.embedded_rows import joined
from quengine.memory import image_room
from quengine.request.feature_cache import EncodedImage, FeatureCache
from quengine.request.prompt_images import Features

BYTES = 32


class DeviceFeatures(Features):
    """Of four rows of two values, on a device until they are moved."""

    moved = False

    @property
    def on_device(self) -> bool:
        return not self.moved

    def to_host(self) -> None:
        assert not self.moved
        self.moved = True


def image(name: bytes) -> EncodedImage:
    return EncodedImage(DeviceFeatures(name, torch.zeros(4, 2)), (4,))


def kept(cache: FeatureCache, names: bytes) -> dict[str, str]:
    """Of each image that is there: where it is."""
    found = {chr(name): cache.get(bytes([name])) for name in names}
    return {name: "device" if each.features.on_device else "host" for name, each in found.items() if each}


def test_the_device_has_the_newest_and_the_host_those_before() -> None:
    cache = FeatureCache(2 * BYTES, 2 * BYTES)
    for name in b"abcde":
        cache.add(bytes([name]), image(bytes([name])))
    assert (len(cache), cache.nbytes, cache.device_bytes) == (4, 4 * BYTES, 2 * BYTES)
    assert kept(cache, b"abcde") == {"b": "host", "c": "host", "d": "device", "e": "device"}
    assert cache.get(b"d") and cache.get(b"b")  # used last of their memories
    cache.add(b"f", image(b"f"))
    assert kept(cache, b"abcdef") == {"b": "host", "d": "device", "e": "host", "f": "device"}


def test_an_image_without_room_on_the_device_gives_its_memory_up() -> None:
    cache, large = FeatureCache(BYTES, BYTES - 1), image(b"a")
    cache.add(b"a", large)
    assert kept(cache, b"a") == {"a": "host"} and cache.device_bytes == 0
    nowhere = FeatureCache(0, 0)
    nowhere.add(b"b", second := image(b"b"))  # whose prompt still has it
    assert len(nowhere) == nowhere.nbytes == 0 and not second.features.on_device


def test_an_image_that_comes_again_is_counted_once() -> None:
    cache = FeatureCache(BYTES, BYTES)
    for _ in range(2):
        cache.add(b"a", image(b"a"))
    assert (len(cache), cache.nbytes) == (1, BYTES)


def test_a_64th_of_the_free_device_memory_keeps_images() -> None:
    assert [image_room(*each) for each in (("cuda", 6400, 1), ("cuda", 6400, 0), ("cpu", 6400, 1))] == [
        100,
        0,
        0,
    ]


@pytest.mark.gpu
def test_features_of_a_device_and_of_the_host_in_one_step() -> None:
    values = torch.arange(8.0).view(4, 2)
    moved = Features(b"", values.cuda())
    assert moved.on_device
    both = joined([values[:2], moved.values[2:]])
    assert both.is_cuda and torch.equal(both.cpu(), values)
    moved.to_host()
    assert not moved.on_device and moved.values.is_pinned() and torch.equal(moved.values, values)
