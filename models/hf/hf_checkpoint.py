"""A Hugging Face checkpoint folder as the decoder wants it: mapped tensors under GGUF names.

F32, F16 and BF16 tensors are views on the mapped files. Some are copied when they are read. The rows of the llama
family's query and key matrices, under a tenth of a model, go from Hugging Face's order to GGUF's: so a checkpoint and
the GGUF file made of it give the same logits to the last bit, and kernels see one layout per architecture. Norm weights
that an architecture stores minus one, and tensors that lie within others (`hf_parts`), are copied too. Quantized
checkpoints are refused, except for MXFP4 where it is declared.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.lora.change import LowRank
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.architectures import DECLARED
from quengine.models.architectures.architecture import HFPart
from quengine.models.blocks.block import TensorSpec
from quengine.models.config import PROJECTIONS, ModelConfig
from quengine.models.draft_layer import DraftTensors, layer_config, no_draft_layer
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.draft_names import DraftLayerNames
from quengine.models.hf.hf_headers import read_config
from quengine.models.hf.hf_names import HFNames
from quengine.models.hf.hf_parts import StoredPart
from quengine.models.hf.hf_shards import HFShards, StoredTensor, listed
from quengine.models.hf.ranker_folder import read_ranker
from quengine.models.hf.sentence_modules import read_pooling, read_projections
from quengine.models.hf.task_adapters import FolderAdapters
from quengine.models.tensor_table import (
    draft_note,
    draft_tensors,
    holder_of,
    joined_specs,
    keys_of_sharing_layers,
    tensor_specs,
)
from quengine.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quengine.models.template.chat_template import ChatTemplate

_CONVOLUTIONS = ("conv", "ssm_conv1d")
"""Tensors that are stored with one more dimension, by group."""
# Tensors that are not in a checkpoint: the configuration gives their numbers.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# In old checkpoints, a buffer of what the decoder computes.
_BUFFER = "rotary_emb.inv_freq"
_ROWS_AT_A_TIME = 1024


class HFCheckpoint:
    """A checkpoint folder: config.json, and *.safetensors with their index where there are several.

    Implements models.checkpoint.Checkpoint. All headers are checked here; weights are read when something
    computes with them.

    Raises:
        EngineError: a file, shard or tensor is missing, has a wrong shape or an unsupported type, or the
            configuration is not that of a supported, unquantized model. One line, with the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        keys = read_config(path)
        declared = read_hf_config(keys)
        declared = replace(declared, pooling=read_pooling(path) or declared.pooling)
        self._shards = HFShards(path)
        declared = self._with_projections(declared)
        if (ranker := read_ranker(path, keys, declared)) is not None:
            declared = replace(declared, ranker=ranker, pooling="rank")
        self.config = _with_own_output(declared, self._shards)
        self._untied = self.config is not declared
        names = HFNames(self.config, self._shards.files.keys())
        self._adapters: FolderAdapters | None = None
        if DECLARED[self.config.architecture].adapts:
            self._adapters = FolderAdapters(self._shards, names, keys, self.config)
        changes = set() if self._adapters is None else self._adapters.names
        self._tensors = HFTensors(self._shards, self.config, names, changes)

    def _with_projections(self, config: ModelConfig) -> ModelConfig:
        """`config` with an encoder's matrices for the pooled vector, whose tensors are then among the others.

        Raises EngineError: they are not implemented, or the architecture's files have none.
        """
        found = read_projections(self.path, config.embedding_length)
        if not found:
            return config
        if config.encoder is None or not DECLARED[config.architecture].projects:
            problem = f"dense layers behind a {config.architecture} model are not implemented"
            raise EngineError(f"{self.path / 'modules.json'}: {problem}")
        for name, each in zip(PROJECTIONS, found, strict=False):
            self._shards.include(name, each.file)
        sizes = tuple((each.columns, each.rows) for each in found)
        return replace(config, encoder=replace(config.encoder, projections=sizes))

    @property
    def tensors(self) -> "HFTensors":
        """Every tensor of the decoder by its GGUF name; a permuted one is copied on each access."""
        return self._tensors

    @property
    def nbytes(self) -> int:
        """Bytes of the decoder's tensors as stored."""
        return sum(stored.nbytes for stored in self._tensors.stored.values())

    @property
    def weights(self) -> int:
        """The number of elements of all tensors."""
        return sum(prod(stored.shape) for stored in self._tensors.stored.values())

    @property
    def types(self) -> dict[str, int]:
        """How many tensors are stored as each type, the most frequent first."""
        return dict(Counter(stored.dtype for stored in self._tensors.stored.values()).most_common())

    @property
    def notes(self) -> list[str]:
        """Notes for the user on how this model is held, one line each."""
        lines = []
        if self._untied:
            lines.append(
                "config.json ties the output matrix to the embedding; lm_head.weight differs and is used"
            )
        copied = sum(self._tensors.stored[name].nbytes for name in self._tensors.heads)
        if copied:
            lines.append(f"query and key weights are copied into GGUF's row order: {copied / 2**30:.2f} GiB")
        within = [part.header.nbytes for part in self._tensors.within.values() if part.copied]
        if within:
            lines.append(f"{len(within)} tensors are copied out of others: {sum(within) / 2**30:.2f} GiB")
        lines += draft_note(self.config, self._tensors.drafts)
        unused = self._tensors.unused
        if unused:
            lines.append(f"{len(unused)} tensors that the text model does not use: {listed(unused)}")
        return lines

    def draft_tensors(self) -> DraftTensors:
        if (problem := no_draft_layer(self.config, self.path.name, bool(self._tensors.drafts))) is not None:
            raise problem
        own = layer_config(self.config)
        tensors = HFTensors(self._shards, own, DraftLayerNames(self.config, self._shards.files.keys()))
        stored = tensors.stored.values()
        nbytes, weights = sum(each.nbytes for each in stored), sum(prod(each.shape) for each in stored)
        return DraftTensors(tensors, nbytes, weights)

    def adapters(self) -> Mapping[str, Mapping[str, LowRank]]:
        return {} if self._adapters is None else self._adapters.read()

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_hf(self.path)

    def chat_template(self, given: str | None = None) -> "ChatTemplate | None":
        from quengine.models.template.chat_template import ChatTemplate

        return ChatTemplate.from_hf(self.path, given)

    def release_pages(self) -> None:
        """Does nothing: the mapping is the safetensors package's, and the system drops pages when it needs memory."""

    def close(self) -> None:
        """Close the files; tensors taken before stay valid as long as they are held."""
        self._shards.close()


class HFTensors(Mapping[str, QuantTensor]):
    """GGUF name -> tensor of a checkpoint, made when read.

    Attributes, all but the last two by GGUF name. stored: the header of each tensor. heads: the heads of a permuted
    tensor (`TensorSpec.rotated`). changes: the function from the stored values to GGUF's, where they differ. parts: the
    expert and its first row, if one tensor holds all experts. within: tensors that lie within others. stacks: the names
    of matrices that are one tensor here. rows: the rows of a matrix that make up a tensor. drafts: the checkpoint's
    tensors of draft layers. unused: its tensors outside the text model.

    Arguments. names: the names of the layer that drafts, if only that layer is read. changes: tensors that others read
    (`FolderAdapters`).
    """

    def __init__(
        self,
        shards: HFShards,
        config: ModelConfig,
        names: HFNames | None = None,
        changes: Collection[str] = (),
    ) -> None:
        self._shards = shards
        self.stored: dict[str, StoredTensor] = {}
        self.heads: dict[str, tuple[int, int]] = {}
        self.changes: dict[str, Callable[[Tensor], Tensor]] = {}
        self.parts: dict[str, tuple[int, int]] = {}
        self.within: dict[str, StoredPart] = {}
        self.stacks: dict[str, list[str]] = {}
        self.rows: dict[str, tuple[int, ...]] = {}
        declared = DECLARED[config.architecture]
        self._permuted = config.block.attention.rope_layout == "pairs" and not declared.hf_rope_pairs
        self._rows, self._known = declared.hf_rows, declared.hf_unused
        self._has_gate = config.block.feed_forward.has_gate
        self._names = names or HFNames(config, shards.files.keys())
        joined = joined_specs(config)
        for name, spec in tensor_specs(config).items():
            part, shape = declared.hf_parts.get(name.split(".", 2)[-1]), spec.shape
            if part is not None and not self._has_own(name):
                self._take_part(name, shape, part, config)
            elif name.endswith("_exps.weight"):
                self._take_experts(name, shape)
            elif spec.hf_each:
                self._take_stack(name, shape)
            elif not spec.hf and (holder := holder_of(name)) in joined:
                self._take(holder, joined[holder], config)
            elif config.ranker is not None and config.ranker.tokens and name == "cls.output.weight":
                self._take_rows(name, config)
            elif name not in _COMPUTED:
                self._take(name, spec, config)
            if change := declared.hf_changes.get(name.split(".", 2)[-1]):
                self.changes[name] = change
            elif declared.hf_norm_offset and name.endswith("norm.weight"):
                self.changes[name] = partial(torch.add, other=declared.hf_norm_offset)
        self._of_sharing = {
            f"{self._names.body}layers.{name.split('.')[1]}.{module}"
            for name, module in keys_of_sharing_layers(config).items()
        }
        self.drafts = draft_tensors(config, shards.files, f"{self._names.body}layers.")
        self.unused = [] if config.is_draft_layer else self._unused(changes)

    def _take(self, name: str, spec: TensorSpec, config: ModelConfig) -> None:
        hf_name, shape = self._names(name), spec.shape
        if name == "token_embd.weight" and config.tied_output and hf_name not in self._shards.files:
            hf_name = self._names.output  # of two tied tensors either may be the one that is stored
        tensor = name.split(".")[-2]
        as_stored = (1, *shape) if tensor in self._rows else shape
        if tensor in _CONVOLUTIONS and len(shape) == 2:
            as_stored = (shape[0], 1, shape[1])
        as_stored = spec.hf_shape or as_stored
        self.stored[name] = replace(self._shards.stored(hf_name, as_stored), shape=shape)
        if spec.rotated is not None and self._permuted:
            self.heads[name] = spec.rotated

    def _take_rows(self, name: str, config: ModelConfig) -> None:
        """Takes rows of the output matrix, or of the embedding if they are tied, as the tensor `name`."""
        assert config.ranker is not None
        holder = "token_embd.weight" if config.tied_output else "output.weight"
        self.rows[name] = config.ranker.tokens
        self.stored[name] = replace(
            self.stored[holder], shape=(config.ranker.classes, config.embedding_length)
        )

    def _has_own(self, name: str) -> bool:
        """Whether a tensor is stored by itself here that lies within another in some folders of the architecture."""
        return not name.endswith(("_exps.weight", "_exps.bias")) and self._names(name) in self._shards.files

    def _take_part(self, name: str, shape: tuple[int, ...], part: HFPart, config: ModelConfig) -> None:
        of_layer = f"{self._names.body}layers.{name.split('.')[1]}."
        picks = None if part.picks is None else part.picks(config)
        bias = name.endswith(".bias")
        self.within[name] = StoredPart(self._shards, of_layer, part, shape, bias, picks)
        self.stored[name] = self.within[name].header

    def _take_experts(self, name: str, shape: tuple[int, ...]) -> None:
        """The matrices of `name`, [E, rows, columns], one by one: views on the file, however it holds them."""
        count, rows, cols = shape
        layer, kind = name.removesuffix("_exps.weight").rsplit("_", 1)
        ours = [f"{layer}_{kind}.{expert}.weight" for expert in range(count)]
        both = kind != "down" and self._has_gate
        whole = self._names(f"{layer}_gate_up_exps.weight" if both else name)
        if whole in self._shards.files:
            dtype = self._shards.stored(whole, (count, 2 * rows if both else rows, cols)).dtype
            self.stored |= {name: StoredTensor(whole, dtype, (rows, cols)) for name in ours}
            first = rows if kind == "up" and both else 0
            self.parts |= {name: (expert, first) for expert, name in enumerate(ours)}
            return
        stored = {
            one: self._shards.stored(self._names.of_expert(name, expert), (rows, cols))
            for expert, one in enumerate(ours)
        }
        types = sorted({tensor.dtype for tensor in stored.values()})
        if len(types) > 1:
            raise self._shards.error(
                f"experts of {stored[ours[0]].name!r} differ in type: {', '.join(types)}"
            )
        self.stored |= stored

    def _take_stack(self, name: str, shape: tuple[int, ...]) -> None:
        """The matrices of `name`, [E, rows, columns], which a folder stores one by one."""
        names = [self._names.of_stack(name, number) for number in range(shape[0])]
        held = [self._shards.stored(each, shape[1:]) for each in names]
        if len(types := sorted({each.dtype for each in held})) > 1:
            raise self._shards.error(f"{names[0]!r} and others like it differ in type: {', '.join(types)}")
        self.stacks[name], self.stored[name] = names, replace(held[0], shape=shape)

    def _unused(self, changes: Collection[str]) -> list[str]:
        body, output = self._names.body, self._names.output
        # An output matrix that is the embedding again needs no mention.
        known = {stored.name for stored in self.stored.values()} | {output} | self.drafts
        known |= {*changes} | {each for names in self.stacks.values() for each in names}
        known |= {name for part in self.within.values() for name in part.names} | self._of_sharing
        rest = [n for n in self._shards.files if n not in known and not n.endswith(_BUFFER)]
        applied = (body, output.removesuffix("weight"))
        unread = tuple(f"{body}{begin}" for begin in self._known)
        ignored = [n for n in rest if n.startswith(applied) and not (unread and n.startswith(unread))]
        if ignored:
            raise self._shards.error(
                f"{len(ignored)} tensors that this decoder does not apply: {listed(ignored)}"
            )
        return rest

    def __getitem__(self, name: str) -> QuantTensor:
        stored = self.stored[name]
        if name in self.within:
            return QuantTensor(name, FORMATS[stored.dtype], stored.shape, self.within[name].data())
        if name in self.stacks:
            tensor = torch.stack([self._shards.tensor(each) for each in self.stacks[name]])
        else:
            tensor = self._shards.tensor(stored.name)
        if name in self.rows:
            tensor = tensor[list(self.rows[name])]
        if name in self.heads:
            tensor = permute_heads(tensor, *self.heads[name])
        if name in self.parts:
            expert, row = self.parts[name]
            tensor = tensor[expert, row : row + stored.shape[0]]
        dtype = stored.dtype
        if name in self.changes:
            tensor, dtype = self.changes[name](tensor.float()), "F32"
        data = tensor.reshape(-1, stored.shape[-1]).view(torch.uint8)
        return QuantTensor(name, FORMATS[dtype], stored.shape, data)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def __contains__(self, name: object) -> bool:
        return name in self.stored  # the inherited one would make the tensor


def permute_heads(tensor: Tensor, heads: int, rope_dim: int) -> Tensor:
    """A copy of `tensor` [heads * head_dim, ...] with each head's rotated rows in pairs instead of halves.

    Of a head's first `rope_dim` rows, Hugging Face rotates row j with row j + rope_dim/2; GGUF's llama layout
    has them as neighbours, 2j and 2j + 1. Rows from `rope_dim` on are not rotated and stay.
    """
    head_dim = tensor.shape[0] // heads
    rotated = torch.arange(rope_dim).reshape(2, rope_dim // 2).T.flatten()  # 0, d/2, 1, d/2 + 1, ...
    order = torch.cat([rotated, torch.arange(rope_dim, head_dim)])
    rows = (torch.arange(heads)[:, None] * head_dim + order).flatten()
    return tensor[rows]


def _with_own_output(config: ModelConfig, shards: HFShards) -> ModelConfig:
    """`config`, untied if the folder has an output matrix that differs from the embedding.

    `transformers` does the same: a checkpoint with two different matrices was not trained with one.
    """
    names = HFNames(config, shards.files.keys())
    embedding, output = names("token_embd.weight"), names.output
    if not config.tied_output or not {embedding, output} <= shards.files.keys():
        return config
    shape = (config.vocab_size, config.embedding_length)
    shards.stored(embedding, shape), shards.stored(output, shape)  # their shapes and types are good
    first, second = shards.tensor(embedding), shards.tensor(output)
    if first.dtype == second.dtype and _same(first, second):
        return config
    return replace(config, tied_output=False)


def _same(first: Tensor, second: Tensor) -> bool:
    """Whether two matrices are equal; the first rows are compared first, as they tell most different ones apart."""
    rows = range(0, len(first), _ROWS_AT_A_TIME)
    return all(torch.equal(first[i : i + _ROWS_AT_A_TIME], second[i : i + _ROWS_AT_A_TIME]) for i in rows)
