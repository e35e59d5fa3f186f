"""The projector of a model: which file it is in, and whether its rows are those of the model."""

import logging
from pathlib import Path

import torch

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.hub.projectors import find_projector
from quengine.request.content_parts import NOT_READ
from quengine.request.image_prompts import Vision, blank_image

logger = logging.getLogger(__name__)

_BOTH_WAYS = ("gemma3", "gemma4v", "gemma4uv")
"""Projectors whose rows attend to one another both ways in layers of the text model that say so
(AttentionForm.images_both_ways)."""


def projector_path(config: EngineConfig, model: Path) -> Path | None:
    """The file or folder with the projector of a model, if there is one and it is wanted."""
    if config.no_mmproj:
        return None
    if config.mmproj is not None:
        return Path(config.mmproj)
    if not _may_see(model):
        return None
    from quengine.models.vision import find_vision  # a third of a second that models of text do without

    return find_vision(model)


def _may_see(model: Path) -> bool:
    """Whether it is worth looking for a projector."""
    if model.is_dir():
        config = model / "config.json"
        return config.is_file() and b"vision_config" in config.read_bytes()
    return find_projector(model) is not None


def open_vision(
    config: EngineConfig, path: Path, model: ModelConfig, device: torch.device
) -> tuple[Vision | None, list[str]]:
    """The projector on the device, and lines for the user. None: the model reads text alone, also where the projector
    that was found beside it cannot be used.

    Raises:
        EngineError: the file that `config.mmproj` names is no projector, is for another model, or is not implemented.
    """
    if model.encoder is not None or (found := projector_path(config, path)) is None:
        return None, []
    try:
        vision = _opened(config, found, path, model, device)
    except EngineError as error:
        if config.mmproj is not None:
            raise
        return None, [f"{NOT_READ}: {error}"]
    return vision, [f"images are read, by the projector {vision.projector} of {found.name}"]


def _opened(
    config: EngineConfig, found: Path, path: Path, model: ModelConfig, device: torch.device
) -> Vision:
    from quengine.models.vision import load_processor, load_vision

    processor = load_processor(found)  # without weights
    if processor.settings.text_size != model.embedding_length:
        raise EngineError(
            f"{found}: its rows have {processor.settings.text_size} values, and those of {path.name} "
            f"{model.embedding_length}: it is the projector of another model; --no-mmproj leaves it out"
        )
    prepared = processor.prepare(blank_image(32))
    name = processor.settings.projector
    if prepared.bidirectional and name not in _BOTH_WAYS:
        raise EngineError(f"projector {name}: rows that attend to one another both ways are not implemented")
    if prepared.grid is not None and not model.rope_axes:
        raise EngineError(
            f"projector {name}: its rows have positions in three axes, and {path.name} does not say which rotary "
            "frequencies turn by which"
        )
    # The definition that others are measured against is exact in its encoder as well.
    vision = load_vision(found, device, dtype=torch.float64 if config.backend == "reference" else None)
    if device.type == "cuda":
        vision.encode([prepared])  # kernels are compiled before the first image
    logger.info("projector %s: %s", found, vision.projector)
    return vision
