"""Writes projector files (mmproj) of released models' shapes with random weights.

The tensors are those that the projector's own encoder takes of a file, so none is listed here.
"""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.whole_file import beside
from quengine.models.synthetic.projector_presets import PROJECTORS_OF
from quengine.models.synthetic.random_blocks import random_rows
from quengine.models.synthetic.synthetic import add_metadata
from quengine.models.synthetic.synthetic_vocabulary import Metadata
from quengine.models.vision.files import GGUFSource, Weights
from quengine.models.vision.projectors import PROJECTORS
from quengine.models.vision.settings import VisionSettings

_WITHOUT_BIASES = ("pixtral", "gemma4v")
_POOL_ROWS = 512
_NEVER = (".input_min", "v.std_bias")


def write_synthetic_projector(
    path: Path, model: str | VisionSettings, text_size: int, quant: str = "F16", seed: int = 0
) -> Path:
    """Writes the projector of a preset (`PROJECTORS_OF`) or of these settings, whose rows have `text_size` values, to
    `path`. Same seed, same bytes.

    quant: the type of matrices whose rows are whole blocks of it; of others and of the patch embedding F16, of vectors
    F32, as llama.cpp's quantizer leaves them.
    """
    from gguf import GGUFWriter

    settings = replace(PROJECTORS_OF[model] if isinstance(model, str) else model, text_size=text_size)
    taken = TakenWeights(settings)
    PROJECTORS[settings.projector].encoder(taken, settings)
    pools: dict[tuple[str, int], NDArray[np.uint8]] = {}
    with beside(path) as file:
        writer = GGUFWriter(file.name, "clip")
        add_metadata(writer, _metadata(settings))
        for index, (name, (shape, matrix)) in enumerate(taken.shapes.items()):
            kind = _type(shape, quant) if matrix else "F32"
            rows = _rows(name, shape, kind, pools, np.random.default_rng([seed, index]))
            number = TYPE_BY_NAME[kind].number
            writer.add_tensor(name, rows, raw_dtype=number)  # type: ignore[arg-type]
        if (
            settings.projector == "pixtral"
        ):  # llama.cpp wants the row of [IMG_BREAK], which here is the text model's
            writer.add_tensor("v.token_embd.img_break", np.zeros(text_size, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return path


class TakenWeights(Weights):
    """Weights without data, on the meta device; notes the names and shapes of the tensors that an encoder takes, and
    whether each is a matrix."""

    def __init__(self, settings: VisionSettings) -> None:
        super().__init__(GGUFSource.__new__(GGUFSource), torch.device("meta"), torch.float16)
        self._projector = settings.projector
        self.shapes: dict[str, tuple[tuple[int, ...], bool]] = {}

    def has(self, name: str) -> bool:
        if name.endswith("attn_qkv.weight"):
            return self._projector == "qwen3vl_merger"
        absent = self._projector in _WITHOUT_BIASES and name.endswith(".bias")
        return not absent and not name.endswith(_NEVER)

    def count(self, name: str) -> int:  # noqa: ARG002
        return 0

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        self.shapes[name] = shape, dtype is not None
        return torch.empty(shape, dtype=dtype or self.vector, device="meta")


def _type(shape: tuple[int, ...], quant: str) -> str:
    return quant if len(shape) == 2 and shape[-1] % TYPE_BY_NAME[quant].block == 0 else "F16"


def _rows(
    name: str,
    shape: tuple[int, ...],
    kind: str,
    pools: dict[tuple[str, int], NDArray[np.uint8]],
    rng: np.random.Generator,
) -> NDArray[np.uint8]:
    """Weights in their stored type, uint8 [..., row bytes]; each output of a matrix has a deviation of about 1.

    Rows of large matrices are taken of a pool, in an order of their own: drawing 400 million weights takes a minute.
    """
    rows, cols = prod(shape[:-1]), shape[-1]
    if len(shape) == 2 and rows > _POOL_ROWS:
        if (kind, cols) not in pools:
            pools[kind, cols] = random_rows(kind, _POOL_ROWS, cols, cols**-0.5, rng)
        return pools[kind, cols][rng.integers(0, _POOL_ROWS, rows)]
    std = 0.1 if len(shape) == 1 else prod(shape[1:]) ** -0.5
    mean = 1.0 if len(shape) == 1 and name.endswith(".weight") else 0.0
    return random_rows(kind, rows, cols, std, rng, mean).reshape(*shape[:-1], -1)


def _metadata(settings: VisionSettings) -> Metadata:
    deepstack = settings.features.get("deepstack", ())
    vision: Metadata = {
        "embedding_length": settings.width,
        "feed_forward_length": settings.feed_forward,
        "block_count": settings.layers,
        "projection_dim": settings.text_size,
        "patch_size": settings.patch,
        "image_size": settings.image_size,
        "attention.head_count": settings.heads,
        "attention.layer_norm_epsilon": settings.eps,
        "image_mean": list(settings.mean),
        "image_std": list(settings.std),
        "spatial_merge_size": settings.merge,
        "projector.scale_factor": settings.merge,
        "preproc_image_size": settings.longest_edge or settings.image_size,
        "image_min_pixels": settings.min_pixels,
        "image_max_pixels": settings.max_pixels,
    }
    if "deepstack" in settings.features:
        vision["is_deepstack_layers"] = [layer in deepstack for layer in range(settings.layers)]
    return {
        "general.type": "mmproj",
        "general.name": f"synthetic {settings.projector}",
        "clip.projector_type": settings.projector,
        "clip.has_vision_encoder": True,
        "clip.use_silu": settings.activation == "silu",
        "clip.use_gelu": settings.activation != "silu",
        **{f"clip.vision.{key}": value for key, value in vision.items() if value},
    }
