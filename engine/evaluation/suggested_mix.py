"""Types of tensors for a given size, such that the divergence from the unquantized model is as small as possible.

For each tensor `by_tensor` has measured the divergence that it causes alone in one type. In another type the divergence
is assumed to be proportional to the squared error of the weights, measured on some rows: a small change of a matrix
changes the divergence by its square. Beginning with the smallest types, bits then go where a byte lowers the sum of
costs most.
"""

import heapq
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from quengine.errors import EngineError
from quengine.evaluation.by_tensor import TensorCost, TensorCosts
from quengine.kernels.block_formats import FORMATS
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.quantize.imatrix import Imatrix

if TYPE_CHECKING:
    from quengine.kernels.quant_tensor import QuantTensor

CANDIDATES = (
    *("Q2_K", "Q3_K", "IQ3_S", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K"),
    *("Q4_0", "IQ4_NL", "Q5_0", "Q5_1", "Q8_0"),
)
"""Types that a tensor may get, beside its own in the unquantized model."""
WITH_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS")
"""Types that it may get besides where its importances are known."""

_SAMPLE = 1 << 15
"""Weights of a tensor whose error is measured, at most."""
_LEAST = 1e-9
"""Least cost of a tensor: what rounding of logits leaves of a divergence."""


@dataclass(frozen=True)
class Option:
    """A type for a tensor: bytes, and the divergence that it is expected to cost."""

    type_name: str
    nbytes: int
    cost: float


@dataclass(frozen=True)
class SuggestedMix:
    """Types for tensors by name.

    bits_per_weight: of the whole file. kl: the expected divergence, the sum of the tensors' costs; `kl_before`: the
    same sum for the types of model b.
    """

    types: Mapping[str, str]
    bits_per_weight: float
    kl: float
    kl_before: float

    @property
    def tensor_types(self) -> list[str]:
        """`PATTERN=TYPE` for `engine quantize --tensor-type` and `quengine.quantize(tensor_types=...)`."""
        layers = dict[tuple[str, str], list[str]]()
        for name, kind in self.types.items():
            found = re.fullmatch(r"blk\.(\d+)\.(.*)", name)
            rest, layer = (found[2], found[1]) if found else (name, "")
            layers.setdefault((rest, kind), []).append(layer)
        return [_pattern(rest, numbers) + f"={kind.lower()}" for (rest, kind), numbers in layers.items()]


def _pattern(rest: str, layers: Seq[str]) -> str:
    rest = re.escape(rest)
    if layers == [""]:
        return f"^{rest}$"
    numbers = layers[0] if len(layers) == 1 else f"({'|'.join(layers)})"
    return rf"^blk\.{numbers}\.{rest}$"


def suggest(
    costs: TensorCosts,
    a: "Mapping[str, QuantTensor]",
    b: "Mapping[str, QuantTensor]",
    bits_per_weight: float,
    imatrix: Imatrix | None = None,
) -> SuggestedMix:
    """The types that a file of this size should have.

    Args:
        costs: of model b's tensors, each alone, measured against a.
        a, b: their tensors by name.
        bits_per_weight: size of the tensors of the whole file in bits, by weights.
        imatrix: importances that weight the errors, and with which the file will be quantized.

    Raises:
        EngineError: the size is below what the smallest types take.
    """
    names = {name for cost in costs.costs for name in cost.names}
    fixed = sum(tensor.nbytes for name, tensor in b.items() if name not in names)
    weights = sum(tensor.rows * tensor.cols for tensor in b.values())
    budget = int(bits_per_weight * weights / 8) - fixed
    if not costs.alone:
        raise EngineError("costs must be those of each tensor alone: compare_tensors(..., alone=True)")
    expected = [max(cost.kl.value, _LEAST) for cost in costs.costs]
    options = [options_of(cost, kl, a, b, imatrix) for cost, kl in zip(costs.costs, expected, strict=True)]
    least = sum(min(option.nbytes for option in each) for each in options)
    if least > budget:
        raise EngineError(
            f"a size of {bits_per_weight:g} bits a weight: the smallest types take "
            f"{8 * (least + fixed) / weights:.2f}"
        )
    chosen = choose(options, budget)
    taken = sum(option.nbytes for option in chosen)
    types = {
        name: option.type_name
        for cost, option in zip(costs.costs, chosen, strict=True)
        for name in cost.names
    }
    kl = sum(option.cost for option in chosen)
    return SuggestedMix(types, 8 * (taken + fixed) / weights, kl, sum(expected))


def options_of(
    cost: TensorCost,
    kl: float,
    a: "Mapping[str, QuantTensor]",
    b: "Mapping[str, QuantTensor]",
    imatrix: Imatrix | None,
) -> list[Option]:
    """The types that a tensor may get. Its type in model a has a cost of 0; `kl` is its cost in model b's type."""
    name = cost.names[0]
    own, other = a[name], b[name]
    errors = errors_of(own, other, _importance(imatrix, own))
    measured = max(errors.pop(""), 1e-30)
    found = [Option(own.format.name, cost.bytes_a, 0.0)]
    for kind, error in errors.items():
        nbytes = TYPE_BY_NAME[kind].row_bytes(own.cols) * (cost.weights // own.cols)
        found.append(Option(kind, nbytes, kl * error / measured))
    return found


def _importance(
    imatrix: Imatrix | None, tensor: "QuantTensor"
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None":
    """The importance of each column, fp32 [columns], as the mean over experts; None: the imatrix has none."""
    values = None if imatrix is None else imatrix.of(tensor.name, tensor.shape)
    return None if values is None else np.asarray(values.mean(0), np.float32)


def errors_of(
    own: "QuantTensor",
    other: "QuantTensor",
    importance: "np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None",
) -> dict[str, float]:
    """Type -> squared error of some rows of a tensor in that type; "" -> the error of the same rows in `other`."""
    import torch

    from quengine.kernels.block_formats import dequantize
    from quengine.kernels.quantize.quantize import quantize
    from quengine.models.quantize.quantizer import quantizers_on

    count = max(1, min(own.rows, _SAMPLE // own.cols))
    rows = torch.linspace(0, own.rows - 1, count).round().long()
    x = dequantize(own.format, own.data[rows])
    columns = None if importance is None else torch.from_numpy(importance)

    def error(y: torch.Tensor) -> float:
        squares = (x - y).double().square()
        return float((squares if columns is None else squares * columns).sum())

    found = {"": error(dequantize(other.format, other.data[rows]))}
    for kind in CANDIDATES if columns is None else (*CANDIDATES, *WITH_IMPORTANCE):
        if own.cols % FORMATS[kind].block == 0 and kind != own.format.name:
            blocks = quantize(FORMATS[kind], x, columns, quantizers_on(x.device))
            found[kind] = error(dequantize(FORMATS[kind], blocks))
    return found


def choose(options: Seq[Seq[Option]], budget: int) -> list[Option]:
    """One option for each tensor, with at most `budget` bytes in all. Beginning with the smallest options, it takes
    the step that lowers the sum of costs most per byte, along the lower convex hull of each tensor's options."""
    hulls = [hull(each) for each in options]
    places = [0] * len(hulls)
    left = budget - sum(each[0].nbytes for each in hulls)
    steps = [(_slope(each[0], each[1]), number) for number, each in enumerate(hulls) if len(each) > 1]
    heapq.heapify(steps)
    while steps:
        _, number = heapq.heappop(steps)
        own, place = hulls[number], places[number]
        more = own[place + 1].nbytes - own[place].nbytes
        if more > left:
            continue  # later options of this tensor take even more
        left -= more
        places[number] = place = place + 1
        if place + 1 < len(own):
            heapq.heappush(steps, (_slope(own[place], own[place + 1]), number))
    return [own[place] for own, place in zip(hulls, places, strict=True)]


def _slope(a: Option, b: Option) -> float:
    return (b.cost - a.cost) / (b.nbytes - a.nbytes)


def hull(options: Iterable[Option]) -> list[Option]:
    """The options on the lower convex hull, by bytes, from the smallest to the one of the least cost."""
    found = list[Option]()
    for option in sorted(options, key=lambda each: (each.nbytes, each.cost)):
        if found and option.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], option):
            found.pop()
        found.append(option)
    return found


def suggest_types(
    costs: TensorCosts,
    a: str | Path,
    b: str | Path,
    bits_per_weight: float,
    imatrix: str | Path | None = None,
) -> SuggestedMix:
    """The type of every tensor with which a file of a given size is expected to be closest to model a.

    Args:
        costs: what `compare_tensors(a, b, ..., alone=True)` has measured.
        a: the model that the file is to be made of.
        b: the quantized file that it was compared with.
        bits_per_weight: the size of the whole file, in bits for each weight.
        imatrix: importances of columns, a file of llama-imatrix in either format.

    Raises:
        EngineError: as `compare_tensors`.
    """
    from quengine.models.checkpoint import open_checkpoint
    from quengine.models.hub.hub import resolve_model
    from quengine.models.quantize.imatrix import read_imatrix

    importance = None if imatrix is None else read_imatrix(Path(imatrix))
    with ExitStack() as stack:
        of_a, of_b = (
            stack.enter_context(closing(open_checkpoint(resolve_model(str(each))))) for each in (a, b)
        )
        return suggest(costs, of_a.tensors, of_b.tensors, bits_per_weight, importance)
