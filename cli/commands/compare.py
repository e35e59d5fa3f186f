"""`engine compare`: how far a model's predictions are from another's, on the same tokens.

The result goes to standard output, progress to standard error.
"""

import re
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quengine.cli import interrupts
from quengine.cli.commands.perplexity import RUN_OPTIONS, TEXT, TextFiles, joined_texts, last_shown, time_left
from quengine.cli.flags import takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import OUTPUT, Flag, Range

if TYPE_CHECKING:
    from quengine.evaluation.by_tensor import TensorCosts
    from quengine.evaluation.compare import FileComparison
    from quengine.evaluation.divergence import FileDivergence
    from quengine.evaluation.suggested_mix import SuggestedMix
    from quengine.llm import LLM
    from quengine.models.quantize.imatrix import Imatrix
    from quengine.scoring.perplexity import Estimate

TENSORS = "Tensor by tensor"


@dataclass(frozen=True)
class CompareFlags:
    """On which text, and how it is reported."""

    files: TextFiles = ()
    ctx: Annotated[
        int, Range(4), Flag("-c --ctx --ctx-size", "Tokens of a chunk, whose second half is scored.", TEXT)
    ] = 512
    chunks: Annotated[
        int | None,
        Range(1),
        Flag("--chunks", "Chunks to compute, at most. (default: all; by tensor 1)", TEXT, "N"),
    ] = None
    by_tensor: Annotated[
        bool,
        Flag("--by-tensor", "What each tensor's type costs: it alone is restored from A.", TENSORS),
    ] = False
    budget: Annotated[
        str | None,
        Flag(
            "--budget",
            "Types for a file of this size, such as 4.5bpw, for engine quantize; each tensor's cost is then that of A "
            "with it alone as in B.",
            TENSORS,
            "BPW",
        ),
    ] = None
    imatrix: Annotated[
        Path | None, Flag("--imatrix", "Importances that the file will be quantized with.", TENSORS, "FILE")
    ] = None
    plot: Annotated[
        Path | None, Flag("--plot", "A chart of these costs, .html, .svg or .png.", TENSORS, "FILE")
    ] = None
    as_json: Annotated[bool, Flag("--json", "Print one JSON object.", OUTPUT)] = False

    def __post_init__(self) -> None:
        if self.plot is not None and not self.tensors:
            raise EngineError(f"--plot {self.plot}: a chart is of --by-tensor; add that")
        if self.imatrix is not None and self.budget is None:
            raise EngineError(f"--imatrix {self.imatrix}: it goes with --budget")
        _bits(self.budget)  # before models are loaded

    @property
    def tensors(self) -> bool:
        """Whether costs of tensors are computed."""
        return self.by_tensor or self.budget is not None

    @property
    def bits(self) -> float | None:
        """The size of `budget` in bits a weight."""
        return _bits(self.budget)


def _bits(budget: str | None) -> float | None:
    """Raises EngineError where it is no size."""
    if budget is None:
        return None
    found = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)(bpw)?", budget.strip().lower())
    if found is None or not float(found[1]):
        raise EngineError(f"--budget {budget}: must be bits a weight, such as 4.5bpw")
    return float(found[1])


@takes_options
def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="The base: a model, or a file of llama-perplexity's --kl-divergence-base."
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The model that is compared with it.")],
    flags: CompareFlags,
    config: Annotated[EngineConfig, RUN_OPTIONS],
) -> None:
    """Measure how far model B's predictions are from A's: perplexities, divergence, most likely tokens.

    --by-tensor measures what the type of each tensor costs: a chunk (1, or --chunks) is computed once for each tensor.
    """
    text = joined_texts(flags.files) if flags.files else None
    from quengine.cli.loading import load_llm
    from quengine.cli.terminal import json_line, write_line

    with interrupts.at_once():
        from quengine.evaluation.compare import FileComparison

    def load(model: str, ctx: int) -> "LLM":
        return load_llm(model, replace(config, ctx_size=ctx, reuse_prefix=not flags.tensors))

    importance = _read_files(flags)
    with FileComparison(a, b, text, flags.ctx, load) as comparison:
        if flags.tensors:
            _by_tensor(flags, comparison, a, importance)
            return
        found = last_shown(comparison.measure(flags.chunks), _running)
    if flags.as_json:
        print(json_line(found.as_dict()))
        return
    for line in _lines(found):
        write_line(line)


def _read_files(flags: CompareFlags) -> "Imatrix | None":
    """The importances of --imatrix. Raises EngineError where they or --plot are wrong, before models are loaded."""
    if flags.plot is not None:
        from quengine.evaluation.cost_chart import check_chart

        check_chart(flags.plot)
    if flags.imatrix is None:
        return None
    from quengine.models.quantize.imatrix import read_imatrix

    return read_imatrix(flags.imatrix)


def _by_tensor(
    flags: CompareFlags, comparison: "FileComparison", a: str, importance: "Imatrix | None"
) -> None:
    from quengine.cli.terminal import json_line, write_line
    from quengine.evaluation.by_tensor import of_comparison
    from quengine.evaluation.cost_chart import write_chart

    progress, began = ProgressLine(), time.perf_counter()

    def step(done: int, total: int) -> None:
        left = (time.perf_counter() - began) * (total - done) / done
        progress(f"computation {done} of {total}: {time_left(left)}")

    try:
        *_, found = of_comparison(comparison, flags.chunks or 1, step, alone=flags.bits is not None)
        progress("measuring errors of types")
        mix = None if flags.bits is None else _mix(comparison, found, flags.bits, importance)
    finally:
        progress.clear()
    if flags.plot is not None:
        write_chart(flags.plot, found)
    if flags.as_json:
        print(json_line(found.as_dict() | ({} if mix is None else _mix_fields(mix))))
        return
    for line in [*_cost_lines(found), *([] if mix is None else _mix_lines(mix, a, flags.imatrix))]:
        write_line(line)


def _mix(
    comparison: "FileComparison", costs: "TensorCosts", bits: float, importance: "Imatrix | None"
) -> "SuggestedMix":
    from quengine.evaluation.suggested_mix import suggest

    assert comparison.other is not None
    a, b = (llm.loaded.checkpoint.tensors for llm in (comparison.other, comparison.llm))
    return suggest(costs, a, b, bits, importance)


def _mix_fields(mix: "SuggestedMix") -> dict[str, Any]:
    return {
        "types": dict(mix.types),
        "tensor_types": mix.tensor_types,
        "bits_per_weight": mix.bits_per_weight,
        "expected_kl": mix.kl,
        "expected_kl_of_b": mix.kl_before,
    }


def _mix_lines(mix: "SuggestedMix", a: str, imatrix: Path | None) -> list[str]:
    words = ["engine", "quantize", a, "-o", "mix.gguf", "--type", "Q4_K_M"]
    words += [] if imatrix is None else ["--imatrix", str(imatrix)]
    words += [word for each in mix.tensor_types for word in ("--tensor-type", each)]
    return [
        "",
        f"{mix.bits_per_weight:.3f} bits a weight, expected divergence {mix.kl:.6f}; by the same estimate "
        f"{mix.kl_before:.6f} with the types of B:",
        shlex.join(words),
    ]


def _cost_lines(found: "TensorCosts") -> list[str]:
    lines = [f"A: {found.a}", f"B: {found.b}", f"divergence, mean     {_pair(found.kl)}", ""]
    lines.append(f"{'tensor':36} {'in A':>7} {'in B':>7} {'MB':>9}  cost{' alone' if found.alone else ''}")
    for cost in found.by_cost:
        name = ", ".join(cost.names)
        sizes = f"{cost.type_a:>7} {cost.type_b:>7} {cost.bytes_b / 1e6:9.2f}"
        lines.append(f"{name:36} {sizes}  {_pair(cost.kl)}")
    lines += ["", *(f"{layer:20} {value:.6f}" for layer, value in found.by_layer.items())]
    if found.left_out:
        lines.append(f"not exchanged: {', '.join(found.left_out)}")
    lines.append(f"{found.tokens} tokens scored in {found.chunks} chunks, in {found.seconds:.1f} s")
    return lines


def _running(found: "FileDivergence") -> str:
    kl, same = found.kl, found.same_top
    return (
        f"chunk {found.chunks} of {found.total_chunks}: divergence {kl.value:.6f} +/- {kl.error:.6f}, "
        f"same top token {100 * same.value:.2f}%, {time_left(found.seconds_left)}"
    )


def _lines(found: "FileDivergence") -> list[str]:
    points = found.kl_points
    rows = [
        ("perplexity of A", _pair(found.perplexity_a)),
        ("perplexity of B", _pair(found.perplexity_b)),
        ("ln(B / A)", _pair(found.log_ratio)),
        ("correlation", f"{100 * found.correlation:.2f}%"),
        ("divergence, mean", _pair(found.kl)),
        *((f"divergence, {name}", f"{value:.6f}") for name, value in points.items()),
        ("change of p, mean", _pair(found.p_change_mean, 100, 4, "%")),
        ("change of p, RMS", _pair(found.p_change_rms, 100, 4, "%")),
        ("same top token", _pair(found.same_top, 100, 3, "%")),
    ]
    lines = [f"A: {found.a}", f"B: {found.b}"]
    lines += [f"{name:20} {value}" for name, value in rows]
    lines += ["", f"{'positions':20} divergence              same top token"]
    for span in found.by_position:
        where = f"{span.first} to {span.last}"
        lines.append(f"{where:20} {_pair(span.kl):22}  {100 * span.same_top:.2f}%")
    count = len(found.tokens.kl)
    lines.append(
        f"{count} tokens scored in {found.chunks} chunks, context {found.ctx}, in {found.seconds:.1f} s"
    )
    return lines


def _pair(estimate: "Estimate", scale: float = 1, digits: int = 6, unit: str = "") -> str:
    return f"{scale * estimate.value:.{digits}f} +/- {scale * estimate.error:.{digits}f}{unit}"
