"""The cost of each tensor's quantization: how much the divergence falls when that tensor alone is restored from model
a.

Both models are loaded. For each chunk the logits of a are computed once, then those of b, then those of b with one
tensor after the other taken from a. Experts of a layer are restored together, by kind. With `alone` it is the other way
round: a gets one tensor after the other from b, so that a cost is not lost in the noise of the other tensors' errors.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quengine.errors import EngineError
from quengine.evaluation.compare import FileComparison, ModelBase, check_finite, part_rows, parts_of
from quengine.evaluation.divergence import Numbers, mean_of
from quengine.evaluation.loaded_weights import LoadedWeights, Parts
from quengine.kernels.quant_tensor import QuantTensor
from quengine.platform.device import on_device
from quengine.scoring.perplexity import DEFAULT_CTX, Estimate
from quengine.scoring.prompt_logits import ScoredTokens

if TYPE_CHECKING:
    from quengine.llm import LLM

Step = Callable[[int, int], None]
"""Called before each computation of a chunk with the number of those done, and of all."""


def _unseen(_done: int, _total: int) -> None:
    """The `Step` that does nothing."""


@dataclass(frozen=True)
class TensorCost:
    """One tensor, or the tensors of a layer's experts of one kind.

    Attributes:
        names: the tensors' names. type_a, type_b: their types in both files. weights: the number of their elements.
        bytes_a, bytes_b: their sizes in both files.
        kl: the cost in nats: by how much the divergence of b from a falls with these tensors taken from a. With
            `alone`: the divergence from a of a model a that has these tensors from b. Its error is that of the mean
            over tokens.
    """

    names: tuple[str, ...]
    type_a: str
    type_b: str
    weights: int
    bytes_a: int
    bytes_b: int
    kl: Estimate


@dataclass(frozen=True)
class TensorCosts:
    """The costs of all tensors whose types differ, as far as they were computed.

    Attributes:
        costs: in the model's order. kl: the divergence of b as it is. left_out: tensors that were not exchanged.
        alone: which of its two meanings `TensorCost.kl` has.
    """

    a: str
    b: str
    costs: tuple[TensorCost, ...]
    kl: Estimate
    left_out: tuple[str, ...]
    tokens: int
    chunks: int
    total_chunks: int
    seconds: float
    alone: bool = False

    @property
    def by_cost(self) -> list[TensorCost]:
        """The costs, highest first."""
        return sorted(self.costs, key=lambda cost: -cost.kl.value)

    @property
    def by_layer(self) -> dict[str, float]:
        """The sum of costs of each layer. Tensors outside of layers stand under their own names."""
        found = dict[str, float]()
        for cost in self.costs:
            kind, number, *_ = (*cost.names[0].split("."), "")
            layer = f"layer {number}" if kind == "blk" else cost.names[0].removesuffix(".weight")
            found[layer] = found.get(layer, 0.0) + cost.kl.value
        return found

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kl": self.kl.value,
            "kl_error": self.kl.error,
            "alone": self.alone,
            "left_out": list(self.left_out),
            "tensors": [
                {"names": list(cost.names), "type_a": cost.type_a, "type_b": cost.type_b}
                | {"weights": cost.weights, "bytes_a": cost.bytes_a, "bytes_b": cost.bytes_b}
                | {"kl": cost.kl.value, "kl_error": cost.kl.error}
                for cost in self.costs
            ],
            "by_layer": self.by_layer,
        }


@dataclass(frozen=True)
class _Unit:
    """Tensors that are restored together, and the loaded weights that they are part of."""

    names: tuple[str, ...]
    parts: list[Parts]


class _Exchange:
    """Exchanges tensors of the model `target` for those of the model `source`.

    Raises:
        EngineError: the models have other tensors, or are shared by several devices.
    """

    def __init__(self, source: "LLM", target: "LLM") -> None:
        for llm in (source, target):
            config = llm.loaded.decoder.config
            if config.ranks > 1 or config.stage is not None:
                raise EngineError("models that several devices share are not compared by tensor")
        self._llm = target
        self.source, self.target = source.loaded.checkpoint.tensors, target.loaded.checkpoint.tensors
        for name, tensor in self.target.items():
            if name not in self.source or self.source[name].shape != tensor.shape:
                raise EngineError(
                    f"{source.loaded.path.name} has no tensor {name} of shape {list(tensor.shape)}"
                )
        units, self.left_out = dict[tuple[str, ...], _Unit](), list[str]()
        for parts in LoadedWeights(target.loaded.decoder, self.target, target.ctx_size):
            kinds = [tuple(dict.fromkeys(part.name for part in kind)) for kind in parts.kinds]
            for names in kinds if parts.experts else [(name,) for name in kinds[0]]:
                if all(self.source[name].format == self.target[name].format for name in names):
                    continue
                if parts.biased or not parts.places:
                    self.left_out += names
                    continue
                unit = units.setdefault(names, _Unit(names, []))
                if parts not in unit.parts:
                    unit.parts.append(parts)
        self.units = list(units.values())

    @contextmanager
    def exchanged(self, unit: _Unit) -> Iterator[None]:
        """A context in which the target computes with the source's tensors of this unit."""
        places = [place for parts in unit.parts for place in parts.places]
        own = [getattr(holder, key) for holder, key in places]
        with on_device(self._llm.loaded.device):
            for parts in unit.parts:
                kinds = [[self._exchanged(part, unit) for part in kind] for kind in parts.kinds]
                weight = parts.load(self._llm.loaded.decoder.backend, kinds)
                for holder, key in parts.places:
                    setattr(holder, key, weight)
        try:
            yield
        finally:
            for (holder, key), weight in zip(places, own, strict=True):
                setattr(holder, key, weight)

    def _exchanged(self, part: QuantTensor, unit: _Unit) -> QuantTensor:
        """The same rows of the source's tensor; `part` itself where its tensor is not in the unit."""
        if part.name not in unit.names:
            return part
        whole, other = self.target[part.name], self.source[part.name]
        row_bytes = whole.data.shape[1]
        start, rest = divmod(part.data.data_ptr() - whole.data.data_ptr(), row_bytes)
        assert not rest and 0 <= start <= whole.rows - part.rows, f"{part.name}: not a part of the file's"
        return QuantTensor(part.name, other.format, part.shape, other.data[start : start + part.rows])


def measure(
    a: "LLM", b: "LLM", chunks: Seq[ScoredTokens], step: Step = _unseen, *, alone: bool = False
) -> Iterator[TensorCosts]:
    """The costs after each of the chunks. A chunk must be computed in one step. Neither model may share prefixes, as
    their cached keys and values would come from weights that have been exchanged.

    Raises:
        EngineError: the models have other tensors, no types differ, or chunks are too long.
    """
    changed = a if alone else b
    _check((a, b), chunks)
    exchange = _Exchange(b, a) if alone else _Exchange(a, b)
    if not exchange.units:
        raise EngineError("both models have all tensors in the same types: there is none to exchange")
    base, began, plain = ModelBase(a), time.perf_counter(), list[Numbers]()
    values = [list[Numbers]() for _ in exchange.units]
    each, vocab = 1 + len(exchange.units), b.model_config.vocab_size
    for number, chunk in enumerate(chunks):
        for ids, first in parts_of(chunk, vocab):
            base.begin(number, ids, first)
            rows = part_rows(base, b, chunk, ids, first)
            check_finite(rows, number, first + 1)
            plain.append(rows.kl)
            for place, (unit, own) in enumerate(zip(exchange.units, values, strict=True), 1):
                step(number * each + place, each * len(chunks))
                with exchange.exchanged(unit):
                    found = part_rows(base, changed, chunk, ids, first)
                check_finite(found, number, first + 1)
                kl = found.kl
                own.append(kl if alone else rows.kl - kl)
        costs = [_cost(exchange, unit, own, alone) for unit, own in zip(exchange.units, values, strict=True)]
        kl = np.concatenate(plain)
        yield TensorCosts(
            *(a.loaded.path.name, b.loaded.path.name, tuple(costs), mean_of(kl), tuple(exchange.left_out)),
            *(len(kl), number + 1, len(chunks), time.perf_counter() - began, alone),
        )


def _check(models: "tuple[LLM, LLM]", chunks: Seq[ScoredTokens]) -> None:
    assert not any(llm.scheduler.prefixes.shares for llm in models), "prefixes are shared"
    if not chunks:
        raise EngineError("no chunk to compute: chunks must be at least 1")
    longest = max(len(chunk.ids) for chunk in chunks) - 1
    most = min(llm.loaded.decoder.chunk_size for llm in models)
    if longest > most:
        raise EngineError(
            f"by tensor, a chunk is computed in one step: {longest + 1} tokens are more than {most}; give -c {most}, "
            "or a larger -ub"
        )


def _cost(exchange: _Exchange, unit: _Unit, values: list[Numbers], alone: bool) -> TensorCost:
    tensors = (exchange.target, exchange.source) if alone else (exchange.source, exchange.target)
    of_a, of_b = ([each[name] for name in unit.names] for each in tensors)
    in_a, in_b = (sum(tensor.nbytes for tensor in each) for each in (of_a, of_b))
    weights = sum(tensor.rows * tensor.cols for tensor in of_b)
    kinds = of_a[0].format.name, of_b[0].format.name
    return TensorCost(unit.names, *kinds, weights, in_a, in_b, mean_of(np.concatenate(values)))


def compare_tensors(
    a: str | Path,
    b: str | Path,
    text: str,
    ctx: int = DEFAULT_CTX,
    *,
    chunks: int | None = 1,
    alone: bool = False,
    step: Step = _unseen,
    **config: Any,
) -> TensorCosts:
    """What the quantization of each tensor of model b costs, measured against model a on a text.

    Args:
        a: the model that b was made of.
        b: the quantized model.
        text: cut into chunks as `perplexity` does.
        ctx: tokens of a chunk.
        chunks: most chunks to compute; None: all. Each takes as many computations as b has tensors.
        alone: a tensor's cost is the divergence of a with this tensor as in b, which `suggest_types` needs; otherwise
            it is the part of b's divergence that goes away with this tensor as in a.
        step: called before each computation with the number that are done and the number of all.
        config: fields of `EngineConfig`, for both models.

    Raises:
        EngineError: as `compare`; or the models have other tensors, or all in the same types.
    """
    from quengine.llm import LLM

    def load(model: str, size: int) -> LLM:
        return LLM(model, ctx_size=size, **config)

    with FileComparison(str(a), str(b), text, ctx, load) as comparison:
        *_, found = of_comparison(comparison, chunks, step, alone=alone)
        return found


def of_comparison(
    comparison: FileComparison, chunks: int | None, step: Step = _unseen, *, alone: bool = False
) -> Iterator[TensorCosts]:
    """The costs of a comparison's model b after each of its chunks; see `measure`."""
    if comparison.other is None:
        raise EngineError(
            "by tensor: A must be a model, whose tensors are restored; it is a file of log-probabilities"
        )
    yield from measure(comparison.other, comparison.llm, comparison.chunks[:chunks], step, alone=alone)
