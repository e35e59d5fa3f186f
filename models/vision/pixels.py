"""Resized and normalized pixels, bit for bit those of the image processors of `transformers` with Pillow.

Channels are computed in parallel threads: one of 1024 x 1024 pixels takes Pillow 8 ms without the interpreter's lock.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor

_CHANNELS = ThreadPoolExecutor(3, "pixels")


def resized(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    """RGB image in `height` x `width` pixels; resample: the number of one of Pillow's filters."""
    if image.size == (width, height):
        return image

    def one(channel: Image.Image) -> Image.Image:
        return channel.resize((width, height), Image.Resampling(resample))

    return Image.merge("RGB", list(_CHANNELS.map(one, image.split())))


def normalized(
    image: Image.Image, mean: Sequence[float], std: Sequence[float], rescale: float = 1 / 255
) -> Tensor:
    """`(value * rescale - mean) / std` of an RGB image: fp32 [3, height, width].

    The product is rounded to fp32 once; the rest is fp32 (`image_transforms.rescale` and `normalize`). Values are
    bytes, so a table of 256 results for each channel is enough.
    """
    values = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    table = (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
    found = np.empty((3, image.height, image.width), np.float32)

    def fill(channel: int) -> None:
        plane = np.asarray(image.getchannel(channel), np.uint8)
        np.take(table[channel], plane, out=found[channel], mode="clip")

    for _ in _CHANNELS.map(fill, range(3)):
        pass
    return torch.from_numpy(found)
