"""Files of saved prefixes: safetensors, with metadata on the model and on how the keys and values were computed.

Tensors:
    `token_ids` int64 [T]: below 0 at the rows of images (`PromptImages.keyed`). The last T % 32 are in no block.
    `held.G` int64: the indices of the blocks of each group of layers.
    `layer.N.k`, `layer.N.v` [blocks, 32, kv_heads, head_dim]: fp16, or codes (kernels/kv/kv_codes.py) with `.k_scale`
        and `.v_scale` fp16 [.., head_dim / 32].
    `layer.N.state.P` fp32 [1, ...]: the parts of a layer's state.
Metadata: `PrefixFiles.header`, and a digest of all tensors. Format: https://huggingface.co/docs/safetensors.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from threading import get_ident

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from quengine.context.saved_prefix import SavedPrefix
from quengine.errors import EngineError
from quengine.kernels.backend import SlotLayer
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.load import LoadedModel
from quengine.models.architectures import attentions_of

FORMAT, VERSION = "quengine saved prefix", "2"
_NAMES = ("k", "v", "k_scale", "v_scale")
_DIGEST = "digest"
_SAMPLE = 4096
"""Bytes of each tensor that the model's digest covers."""
_BESIDE_CACHE = 64 << 20
"""Maximum number of bytes of a file beyond those of the whole cache."""


class PrefixFiles:
    """Writes and reads the prefix files that fit one engine. Thread-safe.

    cache_type: the engine's. deterministic: accept only files computed by the same kernels.
    """

    def __init__(self, loaded: LoadedModel, cache_type: str, deterministic: bool) -> None:
        self._loaded = loaded
        self._cache_type = cache_type
        self._deterministic = deterministic

    @cached_property
    def header(self) -> dict[str, str]:
        """The metadata that must be equal in a file and in this engine; `kernels` only in a deterministic engine."""
        config, context = self._loaded.checkpoint.config, self._loaded.cache.ctx_size
        rope = repr([attention.rotation.spec(context) for attention in attentions_of(config)])
        kernels = self._loaded.decoder.backend.name
        return {
            "format": FORMAT,
            "version": VERSION,
            "model": self._model_digest(),
            "rope": sha256(rope.encode()).hexdigest()[:16],
            "cache_type": self._cache_type,
            "block_size": str(BLOCK_SIZE),
            "windows": ", ".join(str(group.window) for group in config.cache_groups),
            "kernels": f"{kernels}, deterministic" if self._deterministic else kernels,
        }

    def write(self, path: Path, saved: SavedPrefix) -> int:
        """Writes a temporary file, renames it to `path`, and returns its bytes. Raises EngineError on failure."""
        tensors = {"token_ids": torch.tensor(saved.token_ids, dtype=torch.int64)}
        for group, held in enumerate(saved.held):
            tensors[f"held.{group}"] = torch.tensor(held, dtype=torch.int64)
        for layer, stored in enumerate(saved.layers):
            for name, tensor in zip(self._names(layer), stored, strict=True):
                tensors[f"layer.{layer}.{name}"] = tensor.contiguous()
        header = {**self.header, _DIGEST: content_digest(tensors)}
        beside = path.with_name(f".{os.getpid()}-{get_ident()}.saving")
        try:
            beside.touch(mode=0o600)  # its contents reveal the conversation
            save_file(tensors, beside, header)
            size = beside.stat().st_size
            beside.replace(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
            raise EngineError(f"cannot be written: {_reason(error)}") from None
        return size

    def read(self, path: Path) -> tuple[SavedPrefix, int]:
        """The prefix in a file, and the file's bytes. Raises EngineError if it cannot be read or does not fit."""
        most = self._loaded.cache.nbytes + _BESIDE_CACHE
        try:
            if not path.is_file():
                raise EngineError("there is no such file")
            if (size := path.stat().st_size) > most:
                raise EngineError(f"it has {size} bytes, more than the cache of {self._loaded.cache.nbytes}")
            data = path.read_bytes()
            tensors = load(data)
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        except (OSError, MemoryError, SafetensorError, ValueError) as error:
            raise EngineError(f"cannot be read: {_reason(error)}") from None
        self._check_header(header)
        if header.get(_DIGEST) != content_digest(tensors):
            raise EngineError("it is damaged: its contents do not have its digest; save it again")
        return self._checked(tensors), len(data)

    def _check_header(self, header: dict[str, str]) -> None:
        for name, mine in self.header.items():
            if header.get(name) != mine and (name != "kernels" or self._deterministic):
                theirs = str(header.get(name))[:80]
                raise EngineError(
                    f"it does not fit: its {name.replace('_', ' ')} is {theirs!r}, here {mine!r}"
                )

    def _checked(self, tensors: dict[str, Tensor]) -> SavedPrefix:
        """The prefix in these tensors. Raises EngineError if they do not match the header."""
        cache, config = self._loaded.cache, self._loaded.checkpoint.config
        ids = self._indices(tensors, "token_ids")
        blocks = len(ids) // BLOCK_SIZE
        if len(ids) > cache.ctx_size:
            raise EngineError(f"it holds {len(ids)} tokens, the context {cache.ctx_size}")
        if self._loaded.vision is None and any(token < 0 for token in ids):
            raise EngineError("it holds images, and the model is loaded without a projector (--mmproj)")
        if not all(token < config.vocab_size for token in ids):
            raise EngineError(f"it holds token ids outside the vocabulary of {config.vocab_size}")
        held, layers = [], [list[Tensor]() for _ in cache.layers]
        for number, (group, pool) in enumerate(zip(config.cache_groups, cache.pools, strict=True)):
            indices = self._indices(tensors, f"held.{number}")
            first = blocks - 1 if pool.is_state else pool.first_visible(blocks * BLOCK_SIZE)
            needed = range(max(first, 0), blocks)
            if sorted({*indices, *needed}) != indices or (
                indices and not 0 <= indices[0] <= indices[-1] < blocks
            ):
                raise EngineError(f"its blocks of group {number} are not those of {len(ids)} tokens")
            held.append(indices)
            for layer in group.layers:
                layers[layer] = self._layer(tensors, layer, len(indices))
        return SavedPrefix(ids, held, layers)

    def _layer(self, tensors: dict[str, Tensor], layer: int, blocks: int) -> list[Tensor]:
        found = []
        for name, own in zip(self._names(layer), self._loaded.cache.layers[layer].blocks, strict=True):
            tensor, shape = tensors.get(f"layer.{layer}.{name}"), (blocks, *own.shape[1:])
            if tensor is None or tensor.dtype != own.dtype or tuple(tensor.shape) != shape:
                raise EngineError(f"its {name} of layer {layer} is not {own.dtype} {list(shape)}")
            found.append(tensor)
        return found

    def _names(self, layer: int) -> list[str]:
        """The names of a layer's tensors."""
        stored = self._loaded.cache.layers[layer]
        states = isinstance(stored, SlotLayer)
        return [f"state.{part}" if states else _NAMES[part] for part in range(len(stored.tensors))]

    def _indices(self, tensors: dict[str, Tensor], name: str) -> list[int]:
        tensor = tensors.get(name)
        if tensor is None or tensor.dtype != torch.int64 or tensor.ndim != 1:
            raise EngineError(f"it has no list of numbers {name!r}")
        return list(map(int, tensor.tolist()))

    def _model_digest(self) -> str:
        """A SHA-256 that identifies a trained model: of its shape and each tensor's beginning, experts aside."""
        checkpoint = self._loaded.checkpoint
        digest = sha256(repr(checkpoint.config).encode())
        tensors = checkpoint.tensors
        for name in sorted(name for name in tensors if "_exps" not in name):
            tensor = tensors[name]
            digest.update(f"{name} {tensor.format.name} {tensor.shape}".encode())
            digest.update(tensor.data.view(-1)[:_SAMPLE].cpu().numpy().tobytes())
        return digest.hexdigest()


def content_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tensors, with their names and shapes."""
    digest = sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
