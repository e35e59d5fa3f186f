"""Tensor-parallel split: how a model is divided among ranks, by the cuts that its layers declare.

Matrices that read the residual stream are cut along their rows (outputs): queries, keys and values by heads, gate and
up by the feed-forward's columns, the output matrix by tokens. Matrices that write to it are cut along their columns
(inputs), in whole blocks of their format, and their products are summed over the ranks. Experts are cut in the same
way, or, with expert parallelism, each rank has some of them whole. Everything else is on every rank. Source: Shoeybi
et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", section 3.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm, prod

import torch

from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.blocks.block import OUTPUT_CUT, Axis, Cut
from quengine.models.config import LayerSizes, ModelConfig
from quengine.models.tensor_table import joined_specs, tensor_specs

MOST_RANKS = 64

_GROUP = 32
"""Activations are quantized in groups of 32 columns, which no cut may divide."""

_TOKENS = 16
"""The output matrix is cut at multiples of this number of rows, a tile of packed weights."""


@dataclass(frozen=True)
class Rank:
    """Rank `number` of the `count` processes that share a model. `by_expert`: each has some experts whole,
    instead of a part of all (expert parallelism).
    """

    number: int = 0
    count: int = 1
    by_expert: bool = False


_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"(ffn_(?:gate|up|down))\.\d+\.weight")


@lru_cache(32)
def _cuts(config: ModelConfig) -> Mapping[str, Cut | None]:
    """The declared cuts by tensor name. An embedding that is also the output matrix is cut as "output.weight"."""
    specs = {**tensor_specs(config), **joined_specs(config)}
    return {"output.weight": OUTPUT_CUT, **{name: spec.cut for name, spec in specs.items()}}


def cut_of(name: str, config: ModelConfig, by_expert: bool = False) -> Cut | None:
    """The cut of the tensor `name` of a model; None: every rank has all of it. `by_expert`: see Rank."""
    cut = _cuts(config).get(_EXPERT.sub(r"\1_exps.weight", name))  # old files have one tensor per expert
    return Cut("experts", ("experts",)) if cut is not None and cut.experts and by_expert else cut


def shares(total: int, unit: int, count: int) -> list[range]:
    """Divides `total` elements among `count` ranks in whole units, nearly equally; the last gets the remainder."""
    units = total // unit
    bounds = [units * rank // count * unit for rank in range(count)] + [total]
    return [range(bounds[rank], bounds[rank + 1]) for rank in range(count)]


def vocab_shares(vocab_size: int, ranks: int) -> list[int]:
    """Number of rows of the output matrix on each rank."""
    return [len(share) for share in shares(vocab_size, _TOKENS, ranks)]


class ModelSplit:
    """One rank's part of a model.

    Args:
        config: the shape of the whole model.
        tensors: all tensors of the model.
        rank: the rank.

    Raises:
        EngineError: that many ranks cannot share the model; the message names the tensor and the numbers.
    """

    def __init__(self, config: ModelConfig, tensors: Mapping[str, QuantTensor], rank: Rank) -> None:
        self.whole, self.rank = config, rank
        self._units = _units(config, tensors, rank.by_expert)
        problem = self._problem(rank.count, tensors)
        if problem is not None:
            fitting = [n for n in range(1, 9) if n != rank.count and self._problem(n, tensors) is None]
            ways = " or ".join(map(str, fitting))
            raise EngineError(f"--tensor-parallel {rank.count}: {problem}; this model takes {ways}")
        self._of_sizes = {sizes: self._axis_ranges(sizes) for sizes in _sizes(config)}
        self.config = self._rank_config()

    def tensor(self, tensor: QuantTensor) -> QuantTensor:
        """The rank's part of a tensor: a view if it is contiguous, otherwise a copy."""
        cut = self._cut(tensor)
        if cut is None:
            return tensor
        if cut.along == "first":
            data = tensor.data if self.rank.number == 0 else torch.zeros_like(tensor.data)
            return replace(tensor, data=data)
        kept = self._kept(tensor.name, cut)
        shape = self.shape(tensor)
        if cut.along == "experts":
            experts = tensor.data.view(tensor.shape[0], -1, tensor.data.shape[1])
            (held,) = kept
            data = experts[held.start : held.stop].flatten(0, 1)
        elif cut.along == "columns":
            spans = [[tensor.format.row_bytes(edge) for edge in (part.start, part.stop)] for part in kept]
            data = torch.cat([tensor.data[:, start:stop] for start, stop in spans], dim=1)
        else:
            matrices = tensor.data.view(-1, tensor.shape[-2], tensor.data.shape[1])
            parts = [matrices[:, part.start : part.stop] for part in kept]
            data = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)).flatten(0, 1)
        return QuantTensor(tensor.name, tensor.format, shape, data.contiguous())

    def change(self, name: str, change: LowRank) -> LowRank:
        """The rank's part of a LoRA adapter's change of a matrix: its columns of A, or its rows of B."""
        cut = cut_of(name, self.whole, self.rank.by_expert)
        if cut is None:
            return change
        kept = self._kept(name, cut)
        if cut.along == "experts":
            (held,) = kept
            return change._replace(a=change.a[held.start : held.stop], b=change.b[held.start : held.stop])
        index = torch.cat([torch.arange(part.start, part.stop) for part in kept])
        if cut.along == "columns":
            return change._replace(a=change.a.index_select(-1, index))
        return change._replace(b=change.b.index_select(-2, index))

    def shape(self, tensor: QuantTensor) -> tuple[int, ...]:
        """The shape of the rank's part."""
        cut = self._cut(tensor)
        if cut is None or cut.along == "first":
            return tensor.shape
        size = sum(map(len, self._kept(tensor.name, cut)))
        if cut.along == "experts":
            return (size, *tensor.shape[1:])
        if cut.along == "columns":
            return (*tensor.shape[:-1], size)
        return (*tensor.shape[:-2], size, tensor.shape[-1])

    def _cut(self, tensor: QuantTensor) -> Cut | None:
        return cut_of(tensor.name, self.whole, self.rank.by_expert)

    def _kept(self, name: str, cut: Cut) -> list[range]:
        """The rank's rows, columns or experts in each part of a tensor."""
        layer = _LAYER.match(name)
        ranges = self._of_sizes[self.whole.sizes(int(layer[1]) if layer else 0)]
        start, kept = 0, list[range]()
        for axis, unit in zip(cut.axes, cut.units or (1,) * len(cut.axes), strict=True):
            part, total = ranges[axis]
            kept.append(range(start + unit * part.start, start + unit * part.stop))
            start += unit * total
        return kept

    def _axis_ranges(self, sizes: LayerSizes) -> dict[Axis, tuple[range, int]]:
        """Axis -> the rank's range of it and its whole length, in a layer of these sizes."""
        config, (number, count) = self.whole, (self.rank.number, self.rank.count)
        size, heads, kv_heads = sizes.head_dim or config.head_dim, sizes.head_count, sizes.head_count_kv
        own = shares(heads, 1, count)[number]
        held = max(1, kv_heads // count)
        first = number * kv_heads // count
        ranges: dict[Axis, tuple[range, int]] = {
            "queries": (range(own.start * size, own.stop * size), heads * size),
            "keys": (range(first * size, (first + held) * size), kv_heads * size),
            "heads": (own, heads),
            "tokens": (shares(config.vocab_size, _TOKENS, count)[number], config.vocab_size),
        }
        if config.gated_delta is not None:
            key_heads = config.gated_delta.key_heads
            ranges["key_heads"] = (shares(key_heads, 1, count)[number], key_heads)
        if config.mamba2 is not None:
            groups = config.mamba2.groups
            ranges["groups"] = (shares(groups, 1, count)[number], groups)
        if config.experts is not None:
            ranges["experts"] = (shares(config.experts.count, 1, count)[number], config.experts.count)
        for axis, unit in self._units.items():
            total = _lengths(config, sizes)[axis]
            ranges[axis] = (shares(total, unit, count)[number], total)
        return ranges

    def _rank_config(self) -> ModelConfig:
        """The model's shape on this rank."""
        config, count = self.whole, self.rank.count
        ranges = self._of_sizes[config.sizes(0)]
        widths = {axis: len(ranges[axis][0]) for axis in self._units}
        of_layers = [self._rank_sizes(config.sizes(layer)) for layer in range(config.block_count)]
        made = replace(
            config,
            ranks=count,
            head_count=max(sizes.head_count for sizes in of_layers),
            head_count_kv=max(sizes.head_count_kv for sizes in of_layers),
            feed_forward_length=max(sizes.feed_forward_length for sizes in of_layers),
            layer_sizes=tuple(of_layers) if config.layer_sizes else (),
            conv_channels=widths.get("channels", config.conv_channels),
        )
        if config.gated_delta is not None:
            delta = config.gated_delta
            keys, values = delta.key_heads // count, delta.value_heads // count
            made = replace(made, gated_delta=replace(delta, key_heads=keys, value_heads=values))
        if config.mamba2 is not None:
            mamba = config.mamba2
            made = replace(
                made, mamba2=replace(mamba, heads=mamba.heads // count, groups=mamba.groups // count)
            )
        if config.experts is not None:
            experts = replace(
                config.experts,
                feed_forward_length=widths.get("expert_inner", config.experts.feed_forward_length),
                shared_feed_forward_length=widths.get("shared_inner", 0),
                held=ranges["experts"][0] if self.rank.by_expert else None,
            )
            made = replace(made, experts=experts)
        return made

    def _rank_sizes(self, sizes: LayerSizes) -> LayerSizes:
        """The sizes that a layer of these sizes has on the rank."""
        count, (heads, kv_heads, length, size) = self.rank.count, sizes
        if self.whole.splits_heads:
            heads, kv_heads = heads // count, max(1, kv_heads // count)
        inner = self._of_sizes[sizes].get("inner")
        return LayerSizes(heads, kv_heads, length if inner is None else len(inner[0]), size)

    def _problem(self, count: int, tensors: Mapping[str, QuantTensor]) -> str | None:
        """Why `count` ranks cannot share the model; None if they can."""
        config = self.whole
        if not 1 <= count <= MOST_RANKS:
            return f"must be from 1 to {MOST_RANKS}"
        if count > 1 and config.altup is not None:
            return "not implemented for layers with alternating updates"
        for sizes, layer in _sizes(config).items():
            problem = self._problem_of_layer(count, tensors, layer, sizes)
            if problem is not None:
                return problem
        if count > 1 and (problem := _net_problem(config, tensors, count)):
            return problem
        return _experts_problem(config, tensors, count) if self.rank.by_expert else None

    def _problem_of_layer(
        self, count: int, tensors: Mapping[str, QuantTensor], layer: int, sizes: LayerSizes
    ) -> str | None:
        """As `_problem`, for the layers of these sizes, of which `layer` is the first."""
        config, heads, kv_heads = self.whole, sizes.head_count, sizes.head_count_kv
        if config.splits_heads:
            if heads % count:
                return f"blk.{layer}.attn_q has {heads} heads, which {count} ranks cannot share equally"
            if kv_heads % count and count % kv_heads:
                found = f"blk.{layer}.attn_k has {kv_heads} heads"
                return f"{found}, which neither divide {count} ranks nor are a multiple"
            columns = heads // count * (sizes.head_dim or config.head_dim)
            for name in _named(tensors, "attn_output.weight", config, sizes):
                block = lcm(tensors[name].format.block, _GROUP)
                if count > 1 and columns % block:
                    form = tensors[name].format.name
                    return f"{name} ({form}) has {columns} columns a rank, not a multiple of {block}"
        for axis, unit in self._units.items():
            total = _lengths(config, sizes)[axis]
            if total // unit < count:
                name, way = _DOWN[axis], ", or --expert-parallel" if axis == "expert_inner" else ""
                return f"{name} has {total} columns, {total // unit} pieces of {unit} for {count} ranks{way}"
            if axis == "channels" and total // unit % count:  # ranks hand over equal parts of a state
                pieces = f"{total // unit} pieces of {unit} columns"
                return f"{_DOWN[axis]} has {pieces}, which {count} ranks cannot share equally"
        return None


_DOWN: Mapping[Axis, str] = {
    "inner": "ffn_down",
    "expert_inner": "ffn_down_exps",
    "shared_inner": "ffn_down_shexp",
    "channels": "shortconv.out_proj",
}


def _net_problem(config: ModelConfig, tensors: Mapping[str, QuantTensor], count: int) -> str | None:
    """Why `count` ranks cannot share the heads of a model's gated delta nets or Mamba2 layers; None: they can."""
    if config.gated_delta is not None:
        heads, kind = config.gated_delta.key_heads, "key heads of gated delta nets"
    elif config.mamba2 is not None:
        heads, kind = config.mamba2.groups, "groups of Mamba2's heads"
    else:
        return None
    if heads % count:
        return f"{heads} {kind}, which {count} ranks cannot share equally"
    for name in (name for name in tensors if name.endswith(".ssm_out.weight")):
        form, cut = tensors[name].format, cut_of(name, config)
        block = lcm(form.block, _GROUP)
        assert cut is not None
        if columns := next((unit * heads // count for unit in cut.units if unit * heads // count % block), 0):
            return f"{name} ({form.name}) has parts of {columns} columns a rank, not a multiple of {block}"
    return None


def _experts_problem(config: ModelConfig, tensors: Mapping[str, QuantTensor], count: int) -> str | None:
    """Why `count` ranks cannot have whole experts each; None if they can."""
    if config.experts is None:
        return "--expert-parallel is for models with experts, which this one has not"
    if config.experts.count < count:
        return f"{config.experts.count} experts for {count} ranks"
    alone = next((name for name in tensors if _EXPERT.search(name)), None)
    return (
        None
        if alone is None
        else f"--expert-parallel takes experts in one tensor, and {alone} is of one expert"
    )


def _sizes(config: ModelConfig) -> Mapping[LayerSizes, int]:
    """The sizes that layers have, each with the first layer that has them."""
    return {config.sizes(layer): layer for layer in reversed(range(config.block_count))}


def _lengths(config: ModelConfig, sizes: LayerSizes) -> dict[Axis, int]:
    """Axis -> its length, for axes of feed-forwards and convolutions that are cut along columns."""
    lengths: dict[Axis, int] = {}
    experts = config.experts
    if experts is None or experts.dense_layers or config.block.experts.beside_dense:
        lengths["inner"] = sizes.feed_forward_length
    if experts is not None:
        lengths["expert_inner"] = experts.feed_forward_length
        if experts.shared_feed_forward_length:
            lengths["shared_inner"] = experts.shared_feed_forward_length
    if config.conv_channels:
        lengths["channels"] = config.conv_channels
    return lengths


def _units(config: ModelConfig, tensors: Mapping[str, QuantTensor], by_expert: bool) -> dict[Axis, int]:
    """Axis -> unit of its cuts, for axes along columns: whole blocks of all matrices along it."""
    units: dict[Axis, int] = dict.fromkeys(_lengths(config, config.sizes(0)), _GROUP)
    if by_expert:
        units.pop("expert_inner", None)
    for name in tensors:
        cut = cut_of(name, config, by_expert)
        if cut is not None and cut.along == "columns" and cut.axes[0] in units and name.endswith(".weight"):
            units[cut.axes[0]] = lcm(units[cut.axes[0]], tensors[name].format.block)
    return units


def _named(
    tensors: Mapping[str, QuantTensor], kind: str, config: ModelConfig, sizes: LayerSizes
) -> Sequence[str]:
    """The names of the tensors of this kind in the layers of these sizes."""
    found = ((name, _LAYER.match(name)) for name in tensors if name.endswith(f".{kind}"))
    return [name for name, layer in found if layer and config.sizes(int(layer[1])) == sizes]


class SplitTensors(Mapping[str, QuantTensor]):
    """A rank's part of a model's tensors, each cut when it is accessed, so that only that part of the file is read.

    If the output matrix is the embedding, its rows are cut like an output matrix's, as "output.weight".
    """

    def __init__(self, tensors: Mapping[str, QuantTensor], split: ModelSplit) -> None:
        self._tensors, self._split = tensors, split
        tied = split.whole.tied_output and split.rank.count > 1
        self._names = [*tensors, *(["output.weight"] if tied and "output.weight" not in tensors else [])]

    def __getitem__(self, name: str) -> QuantTensor:
        return self._split.tensor(self._whole(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def stored(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each part, without reading it."""
        wholes = {name: self._whole(name) for name in self._names}
        return {name: (whole.format.name, self._split.shape(whole)) for name, whole in wholes.items()}

    def sizes(self) -> Iterator[tuple[str, int, int]]:
        """Name, bytes and number of weights of each part, without reading it."""
        for name in self._names:
            whole = self._whole(name)
            *rows, cols = self._split.shape(whole)
            yield name, prod(rows) * whole.format.row_bytes(cols), prod(rows) * cols

    def _whole(self, name: str) -> QuantTensor:
        if name in self._tensors:
            return self._tensors[name]
        if name not in self._names:
            raise KeyError(name)
        return replace(self._tensors["token_embd.weight"], name=name)
