"""Finds the first operation that exceeds its budget: two sides, operation by operation, on the same inputs.

Side a runs, and what goes into and comes out of each of its operations is kept. Side b then runs with a's inputs in
place of its own, so that an error shows where it is made and is not carried on. (Where a backend begins a norm in the
preceding operation, an error of that part is carried into the next operation; the first of the two is named.) Routers
choose the experts of side a.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from quengine.diagnostics.harness import in_parts, nmse_rows
from quengine.diagnostics.parity.parity import ParityReport, TextPosition
from quengine.diagnostics.parity.parity_metrics import nmse_cached
from quengine.diagnostics.parity.parity_operations import Call, Operation, in_the_form_of, rows_of, watched
from quengine.diagnostics.parity.parity_sides import LLMSide
from quengine.kernels.backend import Hidden
from quengine.kernels.moe.router import Routing
from quengine.kernels.phase import Phase

MAX_POSITIONS = 96
"""Most rows of a prefill chunk: the inputs and outputs of every operation are held, about 1 GB for a 7B model."""

CAPTURED = "captured step"
"""The last line of decode: a whole step of side b as it serves, against the same step one operation at a time."""

BUDGETS: Mapping[Phase, float] = {"prefill": 2e-5, "decode": 5e-8}
"""The largest NMSE of an operation at any position, on the same input: activations rounded once to 16-bit floats or to
16-bit integers a group (docs/parity.md has what healthy models show)."""

Q4_0_BUDGET = 1e-3
"""Limit for attention over a q4_0 cache: a key's code that falls the other way, as one in a million does, moves its
score by an eighth of an element. With other types the results differ by less than the budget."""

ROUTE_BUDGET = BUDGETS["decode"]
"""Limit for the weights of a row's experts: a router computes in fp32 in both phases."""

EMBED_BUDGET = 1e-12
"""Limit for an embedded row, which both sides read from the same stored values."""

SUM_ROUNDING = 2.0**-18
"""Relative error of an fp32 sum: an addition rounds by up to 2^-24, and a thousand products that are added to the
residual one by one err by some 2^-19."""

CACHED_BUDGET = 1e-6
"""Limit for a position's keys, or values: both sides round to fp16, and elements near the middle of two fp16 values may
round to different ones."""


@dataclass(frozen=True)
class OperationError:
    """The error of one operation.

    nmse: the largest NMSE over positions of its result or, if it adds to a residual, of the part that it adds. layer:
    None outside the layers. cached: the largest NMSE of the keys or values that an attention wrote, else None.
    """

    operation: str
    layer: int | None
    nmse: float
    budget: float
    cached: float | None = None

    @property
    def within(self) -> bool:
        # Not ">": what is not finite must not pass.
        return self.nmse <= self.budget and (self.cached is None or self.cached <= CACHED_BUDGET)

    @property
    def place(self) -> str:
        """For the user: "layer 3, attention"."""
        return self.operation if self.layer is None else f"layer {self.layer}, {self.operation}"


@dataclass(frozen=True)
class Location:
    """Every operation of one phase, in the order in which they ran, at positions start .. end - 1 of a text."""

    phase: Phase
    start: int
    end: int
    operations: list[OperationError]

    @property
    def first(self) -> OperationError | None:
        """The first operation that exceeds its budget."""
        return next((found for found in self.operations if not found.within), None)

    @property
    def failures(self) -> list[str]:
        """A phrase for the user that names it; empty when every operation is within its budget."""
        return [f"{self.phase}: goes wrong first in {self.first.place}"] if self.first else []


def locate(a: LLMSide, b: LLMSide, report: ParityReport, progress: Callable[[str], None]) -> list[Location]:
    """Compares a prefill chunk and a decode step, each at the place where the report's phase was worst.

    That place comes from the greedy texts if only they fail, or if no others were run. A chunk of one token is decode,
    and left out of prefill. Returns an empty list if a side has several ranks, or experts in host memory: no
    operation then has all values (`LLMSide.watchable`).
    """
    if not (a.watchable and b.watchable):
        return []
    phases: tuple[Phase, ...] = ("prefill", "decode")
    found = []
    for phase in phases:
        progress(f"operation by operation: {phase}")
        place = _worst_place(report, phase)
        start = _chunk_start(place, b.step("prefill")) if phase == "prefill" else place.position
        if phase == "decode" or place.position > start:
            found.append(_locate_phase(a, b, phase, place, start))
    return found


def _worst_place(report: ParityReport, phase: Phase) -> TextPosition:
    failed = {failure.partition(":")[0] for failure in report.failures}
    if phase not in report.worst or ("greedy" in failed and phase not in failed):
        return report.worst["greedy"]
    return report.worst[phase]


def _chunk_start(place: TextPosition, chunk: int) -> int:
    """The first position of the chunk with that position; a later one where the chunk would be too long to keep."""
    return max(place.position // chunk * chunk, place.position + 1 - MAX_POSITIONS)


def _locate_phase(a: LLMSide, b: LLMSide, phase: Phase, place: TextPosition, start: int) -> Location:
    end = place.position + 1
    ids = place.ids[start:end]
    for part in in_parts(place.ids[:start], 0, a.step("prefill")):
        a.forward(*part)
    before = a.cached(0, start)  # states change with the step
    calls = _calls_of(a, ids, start)
    b.set_cached(0, start, before)
    replay = _Replay(calls, a, b, phase, start, end)
    with watched(b.decoder, replay):
        b.eager(ids, start)
    operations = replay.found
    if phase == "decode":
        b.set_cached(0, start, before)
        eager = b.eager(ids, start).clone()
        b.set_cached(0, start, before)
        whole = b.forward(ids, start)
        operations.append(OperationError(CAPTURED, None, _largest(eager, whole), BUDGETS[phase]))
    return Location(phase, start, end, operations)


@dataclass(frozen=True)
class _Kept:
    """An operation of side a: its inputs and its output, on the host."""

    operation: Operation
    inputs: tuple[Tensor, ...]
    output: Tensor
    experts: Tensor | None = None
    """The experts that a router chose, int32 [T, k]."""


def _calls_of(side: LLMSide, ids: list[int], start: int) -> list[_Kept]:
    """Every operation of a step, in the order in which they run."""
    calls: list[_Kept] = []

    def keep(call: Call) -> Hidden:
        # Copied before it runs: an operation may write over what it is given.
        held = tuple(_on_host(value) for value in call.inputs)
        output = call.run(*call.inputs)
        experts = _on_host(output.selected) if isinstance(output, Routing) else None
        calls.append(_Kept(call.operation, held, _on_host(output), experts))
        return output

    with watched(side.decoder, keep):
        side.eager(ids, start)
    return calls


class _Replay:
    """Runs every operation of side b on the inputs that side a had, and compares what both give."""

    def __init__(
        self, calls: Iterable[_Kept], a: LLMSide, b: LLMSide, phase: Phase, start: int, end: int
    ) -> None:
        self.found: list[OperationError] = []
        self._calls = iter(calls)
        self._a, self._b, self._phase = a, b, phase
        self._rows = start, end

    def __call__(self, call: Call) -> Hidden:
        kept, inputs = next(self._calls), call.inputs
        if kept.operation != call.operation:
            raise ValueError(f"side a ran {kept.operation} where side b runs {call.operation}")
        backend = self._b.decoder.backend
        # A residual is added, and read by routers, as it is; what is multiplied comes in the form that side b has.
        placed = [value.to(backend.device, backend.dtype) for value in kept.inputs]
        first = [in_the_form_of(kept.inputs[0], inputs[0], backend)] if inputs else []
        given = placed if call.operation == "route" else first + placed[1:]
        further = {} if kept.experts is None else {"experts": kept.experts.to(backend.device)}
        output = call.run(*given, **further)
        self.found.append(self._compared(call.layer, *_of_one_width(kept, _on_host(output))))
        return _weighted_as(kept, output) if isinstance(output, Routing) else output

    def _compared(self, layer: int | None, kept: _Kept, output: Tensor) -> OperationError:
        operation = kept.operation
        adds = operation.endswith("+residual") and len(kept.inputs) == 2
        nmse = _of_what_is_added(kept, output) if adds else _largest(kept.output, output)
        cached = self._cached(layer) if operation == "attention" and layer is not None else None
        limits: dict[Operation, float] = {"embed": EMBED_BUDGET, "route": ROUTE_BUDGET}
        if self._b.llm.config.cache_type == "q4_0":
            limits["attention"] = Q4_0_BUDGET
        return OperationError(operation, layer, nmse, limits.get(operation, BUDGETS[self._phase]), cached)

    def _cached(self, layer: int) -> float | None:
        """The largest NMSE of the rows that a layer's attention has just cached; None: it caches none."""
        rows = (_layer_rows(side, layer, *self._rows) for side in (self._a, self._b))
        return max((float(errors.max()) for errors in nmse_cached(*rows)), default=None)


def _of_one_width(call: _Kept, output: Tensor) -> tuple[_Kept, Tensor]:
    """Both results, without the padding that the rows of experts have on one side."""
    if call.operation != "experts+glu":
        return call, output
    width = min(call.output.shape[-1], output.shape[-1])
    rows = call.output[..., :width].reshape(-1, width), output[..., :width].reshape(-1, width)
    return replace(call, output=rows[0]), rows[1]


def _weighted_as(call: _Kept, routing: Routing) -> Routing:
    """The routing with the weights that side a had."""
    weights = call.output.to(routing.weights.device, routing.weights.dtype)
    used = routing.weights.shape[1]
    shared = None if routing.shared is None else weights[:, used].contiguous()
    return replace(routing, weights=weights[:, :used].contiguous(), shared=shared)


def _layer_rows(side: LLMSide, layer: int, start: int, end: int) -> list[Tensor]:
    counts = [len(of_layer.tensors) for of_layer in side.llm.runner.cache.layers]
    first = sum(counts[:layer])
    return side.cached(start, end)[first : first + counts[layer]]


def _of_what_is_added(call: _Kept, output: Tensor) -> float:
    """Compares what is added to the residual, not the sum: the residual may be a thousand times larger.

    The rounding of such a sum is no small part of what is added, since some models have one value of 20,000 among ones;
    so differences up to that of two fp32 sums of this size are not counted.
    """
    wanted, residual = call.output.double(), call.inputs[1].double()
    difference = output.double() - wanted
    excess = (difference.abs() - SUM_ROUNDING * wanted.abs()).clamp(min=0) + difference * 0  # NaN stays NaN
    return _largest(wanted, wanted + excess, wanted - residual)


def _largest(a: Tensor, b: Tensor, size: Tensor | None = None) -> float:
    """The largest NMSE of a row, relative to `size` where that is not `a` itself."""
    return float(nmse_rows(a, b, a if size is None else size).max())


def _on_host(value: Hidden) -> Tensor:
    """A copy, which a later operation cannot write over."""
    return rows_of(value).to("cpu", copy=True)
