"""The projector of a model: which file it is in, and whether its rows are those of the model."""

import logging
from pathlib import Path

import torch

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.vision import find_vision, load_vision
from quengine.request.image_prompts import Vision

logger = logging.getLogger(__name__)


def projector_path(config: EngineConfig, model: Path) -> Path | None:
    """The file or folder with the projector of a model, if there is one and it is wanted."""
    if config.no_mmproj:
        return None
    return find_vision(model) if config.mmproj is None else Path(config.mmproj)


def open_vision(config: EngineConfig, path: Path, model: ModelConfig, device: torch.device) -> Vision | None:
    """The projector on the device; None: the model reads text.

    Raises:
        EngineError: the file is no projector, or one for another model.
    """
    if model.encoder is not None or (found := projector_path(config, path)) is None:
        return None
    vision: Vision = load_vision(found, device)
    if vision.text_size != model.embedding_length:
        raise EngineError(
            f"{found}: its rows have {vision.text_size} values, and those of {path.name} {model.embedding_length}: it "
            f"is the projector of another model; --no-mmproj leaves it out"
        )
    logger.info("projector %s: %s", found, vision.projector)
    return vision
