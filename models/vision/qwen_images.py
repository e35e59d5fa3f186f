"""Preprocessing that the Qwen-VL family and GLM-V share: images of any size in whole merged patches.

Definition: `transformers` models/qwen2_vl (Qwen2VLImageProcessor).
"""

from math import ceil, floor, sqrt

from PIL import Image

from quengine.models.gguf.file import GGUFFile
from quengine.models.images.decode import ImageError
from quengine.models.vision.pixels import normalized, resized
from quengine.models.vision.projector import Arranged
from quengine.models.vision.settings import BICUBIC, Keys, VisionSettings

MAX_RATIO = 200
"""Largest ratio of an image's sides."""

QWEN_DEFAULTS: dict[str, object] = {
    "image_mean": (0.48145466, 0.4578275, 0.40821073),
    "image_std": (0.26862954, 0.26130258, 0.27577711),
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "resample": BICUBIC,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
}


def gguf_pixels(file: GGUFFile, low: int, high: int) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of a file, or the family's own where it has none."""
    least = file.get_int("clip.vision.image_min_pixels") or low
    most = file.get_int("clip.vision.image_max_pixels") or high
    return {"min_pixels": min(least, most), "max_pixels": most}


def folder_pixels(processor: Keys) -> dict[str, int]:
    """`min_pixels` and `max_pixels` of the image processor, named so or as the edges of `size`."""
    size = processor.of("size")
    old = [processor.get(key) for key in ("min_pixels", "max_pixels")]
    least = (
        processor.integer("min_pixels", 0, 1 << 30) if old[0] else size.integer("shortest_edge", 0, 1 << 30)
    )
    most = processor.integer("max_pixels", 1, 1 << 30) if old[1] else size.integer("longest_edge", 1, 1 << 30)
    return {"min_pixels": least, "max_pixels": most}


def check_folder(settings: VisionSettings, processor: Keys) -> VisionSettings:
    """Returns `settings`. Raises EngineError if the image processor's patches are not the encoder's."""
    processor.only("patch_size", settings.patch)
    processor.only("merge_size", settings.merge)
    processor.only("temporal_patch_size", 2)
    return settings


def sized(height: int, width: int, step: int, settings: VisionSettings, least: int = 0) -> tuple[int, int]:
    """(height, width) in multiples of `step`, near the image's ratio, with min_pixels to max_pixels pixels.

    least: the least length of a side before the pixels are compared with the limits.

    Raises:
        ImageError: one side is over MAX_RATIO times the other.
    """
    if max(height, width) > MAX_RATIO * min(height, width):
        raise ImageError(f"image: {width} x {height} pixels, one side over {MAX_RATIO} times the other")
    low, high = settings.min_pixels, settings.max_pixels
    tall, wide = (max(least, round(side / step) * step) for side in (height, width))
    if tall * wide > high:
        beta = sqrt(height * width / high)
        return max(step, floor(height / beta / step) * step), max(step, floor(width / beta / step) * step)
    if tall * wide < low:
        beta = sqrt(low / (height * width))
        return ceil(height * beta / step) * step, ceil(width * beta / step) * step
    return max(step, tall), max(step, wide)


def arrange(image: Image.Image, settings: VisionSettings) -> Arranged:
    """The image in whole merged patches, [1, 3, H, W], between the tokens of its beginning and end."""
    step = settings.patch * settings.merge
    height, width = sized(image.height, image.width, step, settings)
    image = resized(image, height, width, settings.resample)
    pixels = normalized(image, settings.mean, settings.std, settings.rescale)
    grid = (1, height // step, width // step)
    return Arranged(pixels[None], ("<|vision_start|>", grid[1] * grid[2], "<|vision_end|>"), grid)
