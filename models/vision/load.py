"""Finds and opens the vision part of a model: a GGUF projector file (mmproj), or a Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quengine.errors import EngineError
from quengine.models.gguf.file import GGUFFile, open_gguf
from quengine.models.hf.json_file import read_json
from quengine.models.hub.projectors import find_projector
from quengine.models.images.limited_decoder import start_decoder
from quengine.models.vision.files import FolderSource, GGUFSource, TensorSource, Weights
from quengine.models.vision.processor import ImageProcessor
from quengine.models.vision.projector import Projector
from quengine.models.vision.projectors import OF_MODEL_TYPE, projector_named
from quengine.models.vision.settings import Keys, VisionSettings
from quengine.models.vision.vision_model import VisionModel


def find_vision(model_path: Path) -> Path | None:
    """The mmproj*.gguf beside a model's GGUF file, or the model's folder if this package computes its vision part.

    `choose_projector` picks one of several files. None: there is no such file, or no such part.
    """
    if model_path.is_dir():
        path = model_path / "config.json"
        config = read_json(path) if path.is_file() else {}
        return model_path if _of_folder(config) is not None and config.get("vision_config") else None
    return find_projector(model_path)


def load_processor(path: Path) -> ImageProcessor:
    """The preprocessing of the projector in `path`, without weights. Also starts the process that decodes images.

    Raises:
        EngineError: no supported projector, or a damaged file.
    """
    start_decoder()
    projector, settings, source = _opened(path)
    try:
        return ImageProcessor(projector, settings, source.identity())
    finally:
        source.close()


def load_vision(path: Path, device: torch.device | str, dtype: torch.dtype | None = None) -> VisionModel:
    """The vision encoder in `path`, a GGUF projector file or a Hugging Face folder, on `device`.

    dtype: that of the matrices and their products; None: matrices as stored, products in fp16 on CUDA and in fp32 on
    the CPU.

    Raises:
        EngineError: no supported projector, a damaged file, or tensors that the projector does not use.
    """
    device = torch.device(device)
    projector, settings, source = _opened(path)
    try:
        matrix = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
        weights = Weights(source, device, matrix, keeps=dtype is None)
        encoder = projector.encoder(weights, settings)
        weights.check_all_taken()
        processor = ImageProcessor(projector, settings, source.identity())
    finally:
        source.close()
    return VisionModel(processor, encoder, projector.deepstack(settings), device)


def _opened(path: Path) -> tuple[Projector, VisionSettings, TensorSource]:
    return open_folder(path) if path.is_dir() else _open_gguf(path)


def _open_gguf(path: Path) -> tuple[Projector, VisionSettings, TensorSource]:
    file = open_gguf(path)
    architecture = file.require_str("general.architecture")
    if architecture != "clip":
        raise file.error("general.architecture", f"{architecture[:80]!r}: no vision part of a model (clip)")
    projector = projector_named(_projector_type(file), str(path))
    return projector, projector.gguf(file), GGUFSource(file, projector.gguf_ignored)


def _projector_type(file: GGUFFile) -> str:
    if not file.get_bool("clip.has_vision_encoder"):
        what = "audio, which is not supported" if file.get_bool("clip.has_audio_encoder") else "no images"
        raise file.error("clip.has_vision_encoder", f"false: the projector is for {what}")
    name = file.get_str("clip.vision.projector_type") or file.get_str("clip.projector_type")
    if name is None:
        raise file.error("clip.projector_type", "missing: a projector of LLaVA's first kind is not supported")
    return name


def open_folder(folder: Path) -> tuple[Projector, VisionSettings, FolderSource]:
    """The projector of a folder, its settings and tensors. Raises EngineError as `load_vision` does."""
    config = read_json(folder / "config.json")
    projector = _of_folder(config)
    if projector is None:
        kind = str(config.get("model_type"))[:80]
        raise EngineError(
            f"{folder / 'config.json'}: the vision part of model_type {kind!r} is not supported"
        )
    given = config.get("vision_config")
    vision = Keys(
        f"{folder / 'config.json'}: vision_config",
        given if isinstance(given, dict) else {},
        projector.vision_defaults,
    )
    processor = _image_processor(folder, projector)
    settings = projector.folder(Keys(str(folder / "config.json"), config, {}), vision, processor)
    parts = (projector.hf_names(settings), projector.hf_changes, projector.hf_parts, projector.hf_ignored)
    return projector, settings, FolderSource(folder, settings, *parts)


def _of_folder(config: Mapping[str, Any]) -> Projector | None:
    kind, vision = config.get("model_type"), config.get("vision_config")
    found = OF_MODEL_TYPE.get(kind) if isinstance(kind, str) else None
    of_vision = vision.get("model_type") if isinstance(vision, dict) else None
    return None if found is not None and found.hf_vision and of_vision not in found.hf_vision else found


def _image_processor(folder: Path, projector: Projector) -> Keys:
    """The image processor's configuration: preprocessor_config.json, or the newer part of processor_config.json."""
    found: dict[str, Any] = {}
    paths = [folder / "preprocessor_config.json", folder / "processor_config.json"]
    for path in paths:
        values = read_json(path) if path.is_file() else {}
        inner = values.get("image_processor", {}) if path is paths[1] else values
        found |= inner if isinstance(inner, dict) else {}
    if not found:
        raise EngineError(
            f"{folder}: has neither preprocessor_config.json nor processor_config.json for images"
        )
    defaults = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
    return Keys(f"{folder}: image processor", found, defaults | dict(projector.processor_defaults))
