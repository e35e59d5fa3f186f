"""The vision part of a Hugging Face folder as a projector's GGUF file (mmproj): tensors, and metadata by projector.

The tensors are those that the vision encoder reads from a folder; they already have GGUF's names and order.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.convert.keys import Keys, Writer
from quengine.models.convert.tensors import FileTensor
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.gguf.writer import TensorInfo
from quengine.models.hf.hf_headers import read_config
from quengine.models.tokenizer import Tokenizer
from quengine.models.vision.files import FolderSource
from quengine.models.vision.load import open_folder
from quengine.models.vision.settings import VisionSettings

_OF_VISION = ("gemma4v",)
"""Projectors whose files may have another one for audio, and name both."""
_IMAGE_SIZES = {"qwen2.5vl_merger": 560, "lfm2": 256, "gemma4v": 224}
"""Image sizes that files state although the projector takes any size."""

_SPLIT = ("qwen2.5vl_merger",)
"""Projectors whose files have queries, keys and values of a layer in three tensors, where folders have one."""

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_PATCHES = (".patch_embd.weight", ".patch_merger.weight")
_BREAK, _BREAK_ROW = "[IMG_BREAK]", "v.token_embd.img_break"


@dataclass(frozen=True)
class ProjectorSource:
    """What a projector's part reads and where it writes: `keys` are config.json's."""

    writer: Writer
    settings: VisionSettings
    keys: Keys


class ProjectorFile:
    """The tensors of the projector's file for `folder`, and the writing of its keys.

    Raises:
        EngineError: the folder has no vision part, one that is not converted, or is damaged.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._projector, self._settings, source = open_folder(folder)
        assert isinstance(source, FolderSource)
        self._source, name = source, self._projector.name
        if name not in PARTS:
            raise EngineError(f"{folder}: projector {name} is not converted yet; {', '.join(PARTS)} are")
        held = _Held(source)
        self.tensors = [
            tensor
            for each in held
            for tensor in _tensors(held, each, self._forced(each), kind, name in _SPLIT)
        ]
        if name == "pixtral":
            self.tensors.append(_break_row(folder, source))

    def close(self) -> None:
        self._source.close()

    def add_keys(self, writer: Writer) -> None:
        """Adds the keys of all projectors, and those of this one."""
        settings = self._settings
        writer.add_clip_has_vision_encoder(True)
        writer.add_vision_projection_dim(settings.text_size)
        writer.add_vision_image_size(_IMAGE_SIZES.get(settings.projector, settings.image_size))
        writer.add_vision_patch_size(settings.patch)
        writer.add_vision_embedding_length(settings.width)
        writer.add_vision_feed_forward_length(settings.feed_forward)
        writer.add_vision_block_count(settings.layers)
        writer.add_vision_head_count(settings.heads)
        writer.add_vision_image_mean(list(settings.mean))
        writer.add_vision_image_std(list(settings.std))
        if self._projector.name in _OF_VISION:
            writer.add_clip_vision_projector_type(self._projector.name)
        else:
            writer.add_clip_projector_type(self._projector.name)
        PARTS[self._projector.name](ProjectorSource(writer, settings, read_config(self.folder)))

    def _forced(self, name: str) -> str | None:
        """The type that this projector's tensor must have, whatever type the others get; None: it may have any."""
        own = self._projector.name
        if own == "gemma3" and name == "mm.input_projection.weight":
            return "F16"
        embeds = name.startswith(("v.patch_embd.", "v.position_embd."))
        return "F32" if embeds and own in ("gemma3", "idefics3") else None


class _Held(Mapping[str, QuantTensor]):
    """GGUF name -> tensor of a folder, read when it is taken."""

    def __init__(self, source: FolderSource) -> None:
        self._source = source

    def __getitem__(self, name: str) -> QuantTensor:
        return _stored(name, self._source.tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.names)

    def __len__(self) -> int:
        return len(self._source.names)


def _stored(name: str, tensor: Tensor) -> QuantTensor:
    tensor = tensor if tensor.ndim else tensor[None]
    data = tensor.contiguous().reshape(-1, tensor.shape[-1]).view(torch.uint8)
    return QuantTensor(name, FORMATS[_NAMES[tensor.dtype]], tuple(tensor.shape), data)


def _tensors(held: _Held, name: str, forced: str | None, kind: str, split: bool) -> list[FileTensor]:
    """The tensors of a file that `name` becomes: itself, or if `split` its rows of queries, keys and values."""
    shape = held[name].shape
    if not split or ".attn_qkv." not in name:
        return [FileTensor(TensorInfo(name, shape, forced or _type(name, shape, kind)), held, (name,))]
    shape = (shape[0] // 3, *shape[1:])
    found = []
    for part, letter in enumerate("qkv"):
        own = name.replace("attn_qkv", f"attn_{letter}")
        change = partial(_third, part)
        found.append(
            FileTensor(TensorInfo(own, shape, _type(own, shape, kind)), held, (name,), change=change)
        )
    return found


def _third(part: int, values: Tensor) -> Tensor:
    return values.chunk(3)[part]


def _type(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) == 1:
        return "F32"
    if any(part in name for part in _PATCHES):
        return "F16" if kind == "F16" else "F32"
    if not name.endswith(".weight") or name.endswith("position_embd.weight"):
        return "F32"
    return "F16" if shape[-1] % TYPE_BY_NAME[kind].block else kind


def _break_row(folder: Path, source: FolderSource) -> FileTensor:
    """Pixtral's token that ends a row of patches, as a row of the text model's embedding. llama.cpp computes with it,
    though its converter omits it for folders."""
    token = Tokenizer.from_hf(folder).control_id(_BREAK)
    if token is None:
        raise EngineError(f"{folder}: its tokenizer has no token {_BREAK}, whose embedding the file needs")
    row = source.embedding_row(token)
    return FileTensor(
        TensorInfo(_BREAK_ROW, tuple(row.shape), "F32"), {_BREAK_ROW: _stored(_BREAK_ROW, row)}, (_BREAK_ROW,)
    )


def _eps(source: ProjectorSource) -> None:
    source.writer.add_vision_attention_layernorm_eps(source.settings.eps)


def _pixtral(source: ProjectorSource) -> None:
    _eps(source)
    _activation(source)
    if "spatial_merge_size" in source.keys:
        source.writer.add_vision_spatial_merge_size(source.settings.merge)


def _gemma3(source: ProjectorSource) -> None:
    _eps(source)
    source.writer.add_vision_use_gelu(True)
    if source.settings.merge != _GEMMA3_MERGE:
        source.writer.add_vision_projector_scale_factor(source.settings.merge)


_GEMMA3_MERGE = 4
"""Patches of a side that become one row, where a file does not say."""


def _idefics3(source: ProjectorSource) -> None:
    _eps(source)
    source.writer.add_vision_projector_scale_factor(source.settings.merge)
    source.writer.add_vision_use_gelu(True)
    source.writer.add_vision_preproc_image_size(source.settings.longest_edge)


def _qwen3(source: ProjectorSource) -> None:
    text = source.keys.get("text_config") or {}
    source.writer.add_vision_attention_layernorm_eps(text.get("rms_norm_eps", 1e-6))
    source.writer.add_vision_use_gelu(True)
    source.writer.add_vision_spatial_merge_size(source.settings.merge)
    deep = source.settings.features["deepstack"]
    source.writer.add_vision_is_deepstack_layers([layer in deep for layer in range(source.settings.layers)])


def _activation(source: ProjectorSource) -> None:
    if source.keys["vision_config"].get("hidden_act", "gelu") == "silu":
        source.writer.add_vision_use_silu(True)
    else:
        source.writer.add_vision_use_gelu(True)


def _internvl(source: ProjectorSource) -> None:
    _eps(source)
    _activation(source)
    source.writer.add_vision_projector_scale_factor(source.settings.merge)
    for key, add in (
        ("min_dynamic_patch", source.writer.add_vision_preproc_min_tiles),
        ("max_dynamic_patch", source.writer.add_vision_preproc_max_tiles),
    ):
        if source.keys.get(key, 0) > 0:
            add(source.keys[key])


def _lfm2(source: ProjectorSource) -> None:
    _eps(source)
    source.writer.add_vision_projector_scale_factor(source.settings.merge)
    source.writer.add_vision_use_gelu(True)


def _gemma4(source: ProjectorSource) -> None:
    source.writer.add_vision_attention_layernorm_eps(source.keys["vision_config"].get("layer_norm_eps", 1e-6))


def _glm4(source: ProjectorSource) -> None:
    _eps(source)
    _activation(source)


def _qwen25(source: ProjectorSource) -> None:
    source.writer.add_vision_attention_layernorm_eps(source.keys.get("rms_norm_eps", 1e-6))
    source.writer.add_vision_use_silu(True)
    full = source.settings.features["full"]
    source.writer.add_vision_n_wa_pattern(full[0] + 1)


PARTS: Mapping[str, Callable[[ProjectorSource], None]] = {
    "pixtral": _pixtral,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "qwen3vl_merger": _qwen3,
    "qwen2.5vl_merger": _qwen25,
    "internvl": _internvl,
    "lfm2": _lfm2,
    "glm4v": _glm4,
    "gemma4v": _gemma4,
}
"""Projector -> what writes its own keys."""
