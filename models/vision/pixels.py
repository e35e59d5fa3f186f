"""Resized and normalized pixels, to the bit those of the image processors of `transformers` with Pillow."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def resized(image: Image.Image, height: int, width: int, resample: int) -> Image.Image:
    """image in `height` x `width` pixels; resample: the number of one of Pillow's filters."""
    return image.resize((width, height), Image.Resampling(resample))


def normalized(
    image: Image.Image, mean: Sequence[float], std: Sequence[float], rescale: float = 1 / 255
) -> Tensor:
    """`(value * rescale - mean) / std` of an RGB image: fp32 [3, height, width].

    The product is rounded to fp32 once; the rest is fp32 (`image_transforms.rescale` and `normalize`). Values are
    bytes, so that each channel has 256 results.
    """
    values = (np.arange(256, dtype=np.float64) * rescale).astype(np.float32)
    table = (values - np.array(mean, np.float32)[:, None]) / np.array(std, np.float32)[:, None]
    planes = np.ascontiguousarray(np.asarray(image, np.uint8).transpose(2, 0, 1))
    found = np.empty(planes.shape, np.float32)
    for channel in range(3):
        np.take(table[channel], planes[channel], out=found[channel], mode="clip")
    return torch.from_numpy(found)
