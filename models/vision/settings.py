"""The sizes of a vision encoder and its preprocessing, from a GGUF projector file or a Hugging Face folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from quengine.errors import EngineError, shown
from quengine.kernels.vision_rows import PatchActivation
from quengine.models.gguf.file import GGUFFile

BILINEAR, BICUBIC, LANCZOS = 2, 3, 1
"""Numbers of Pillow's filters, as preprocessor_config.json has them in `resample`."""
MAX_IMAGE_SIDE = 16_384


@dataclass(frozen=True)
class VisionSettings:
    """The sizes and constants of an encoder, its projector and its preprocessing.

    width: width of the encoder's rows. text_size: width of the text model's rows. patch, image_size: sides in pixels.
    merge: a square of merge x merge patches becomes one row of the prompt. eps: of norms. theta: the base of rotations.
    mean, std: of each channel after `rescale`. resample: Pillow's filter. min_pixels, max_pixels: limits of a resized
    image, for projectors that take any size. longest_edge: side that an image is resized to before it is cut. tile:
    side of the squares that it is cut into. split: whether it is cut. features: numbers that only one projector has.
    """

    projector: str
    width: int
    layers: int
    heads: int
    feed_forward: int
    patch: int
    image_size: int
    text_size: int
    eps: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    activation: PatchActivation = "gelu_tanh"
    rescale: float = 1 / 255
    resample: int = BICUBIC
    merge: int = 1
    theta: float = 10_000.0
    min_pixels: int = 0
    max_pixels: int = 0
    tile: int = 0
    longest_edge: int = 0
    split: bool = True
    features: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Keys:
    """Typed access to a JSON object of a folder. defaults: the values that `transformers` takes for absent keys."""

    def __init__(self, where: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._where = where
        self._values = values
        self._defaults = defaults

    def get(self, key: str) -> Any:
        """The value at `key`; the default if it is absent or null, None if there is none."""
        value = self._values.get(key)
        return self._defaults.get(key) if value is None else value

    def integer(self, key: str, low: int = 1, high: int = 1 << 24) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"{shown(value)} is no integer from {low} to {high}")
        return value

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(key, f"{shown(value)} is no positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            raise self.error(key, f"{shown(value)} is neither true nor false")
        return value

    def channels(self, key: str, positive: bool = False) -> tuple[float, ...]:
        return _channels(self.get(key), lambda problem: self.error(key, problem), positive)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list | tuple) or not all(isinstance(v, int) and v >= 0 for v in value):
            raise self.error(key, f"{shown(value)} is no list of integers")
        return tuple(value)

    def of(self, key: str) -> "Keys":
        """The object at `key`; empty if it is absent."""
        value = self.get(key)
        return Keys(f"{self._where}: {key}", value if isinstance(value, dict) else {}, {})

    def only(self, key: str, *computed: object) -> None:
        """Raises EngineError, with the key, for a value that is not one of `computed`."""
        value = self.get(key)
        if value not in computed:
            raise self.error(key, f"{shown(value)} is not implemented")

    def error(self, key: str, problem: str) -> EngineError:
        return EngineError(f"{self._where}: {key}: {problem}")


def gguf_settings(file: GGUFFile, projector: str, **others: Any) -> VisionSettings:
    """Settings from the metadata that all projectors have; `others` are the projector's own.

    Raises:
        GGUFError: a key is missing, of the wrong type or out of range.
    """
    key = "clip.vision.{}".format
    width = file.require_int(key("embedding_length"), 1, 1 << 16)
    heads = others.pop("heads", None) or file.require_int(key("attention.head_count"), 1, 1 << 10)
    if width % heads:
        raise file.error(key("attention.head_count"), f"{heads} does not divide the width {width}")
    mean = _channels(_floats(file, key("image_mean")), lambda p: file.error(key("image_mean"), p))
    std = _channels(_floats(file, key("image_std")), lambda p: file.error(key("image_std"), p), positive=True)
    common: dict[str, Any] = {
        "patch": file.require_int(key("patch_size"), 1, 1 << 10),
        "image_size": file.require_int(key("image_size"), 1, MAX_IMAGE_SIDE),
        "text_size": file.require_int(key("projection_dim"), 1, 1 << 16),
        "eps": file.get_float(key("attention.layer_norm_epsilon")) or 1e-6,
        "mean": mean,
        "std": std,
    }
    if "layers" not in others:
        common["layers"] = file.require_int(key("block_count"), 1, 1 << 10)
        common["feed_forward"] = file.get_int(key("feed_forward_length"), 1, 1 << 20) or 0
    return VisionSettings(projector=projector, width=width, heads=heads, **(common | others))


def folder_settings(
    projector: str, config: Keys, vision: Keys, processor: Keys, **others: Any
) -> VisionSettings:
    """Settings from config.json, its vision_config, and the image processor's configuration.

    Raises:
        EngineError: a value is missing, out of range, or not implemented.
    """
    processor.only("do_resize", True)
    processor.only("do_rescale", True)
    normalizes = processor.flag("do_normalize")
    width = others.pop("width", None) or vision.integer("hidden_size")
    heads = others.pop("heads", None) or vision.integer("num_attention_heads")
    if width % heads:
        raise vision.error("num_attention_heads", f"{heads} does not divide the width {width}")
    common: dict[str, Any] = {
        "eps": vision.number("layer_norm_eps") if vision.get("layer_norm_eps") is not None else 1e-6,
        "mean": processor.channels("image_mean") if normalizes else (0.0, 0.0, 0.0),
        "std": processor.channels("image_std", positive=True) if normalizes else (1.0, 1.0, 1.0),
        "rescale": processor.number("rescale_factor"),
        "resample": processor.integer("resample", 0, 5),
    }
    sizes = {
        "layers": "num_hidden_layers",
        "feed_forward": "intermediate_size",
        "patch": "patch_size",
        "image_size": "image_size",
    }
    common |= {name: vision.integer(key) for name, key in sizes.items() if name not in others}
    if "text_size" not in others:
        common["text_size"] = config.of("text_config").integer("hidden_size")
    return VisionSettings(projector=projector, width=width, heads=heads, **(common | others))


def _floats(file: GGUFFile, key: str) -> Sequence[float]:
    value = file.get_floats(key)
    if value is None:
        raise file.error(key, "missing from the metadata")
    return [float(each) for each in value]


def _channels(
    value: object, error: Callable[[str], EngineError], positive: bool = False
) -> tuple[float, ...]:
    """Three finite numbers. Raises `error(problem)`."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise error(f"{shown(value)} is no list of three numbers")
    if not all(isinstance(v, int | float) and isfinite(v) and (v > 0 or not positive) for v in value):
        raise error(f"{shown(value)} is no list of three {'positive ' if positive else ''}numbers")
    return tuple(float(v) for v in value)
