"""`engine quantize`: a GGUF file with its tensors in other types."""

from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli import interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quengine.models.quantize.quantize_file import Quantization, QuantizedTensor

_TYPES = "Types of tensors"


def quantize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN", help="The GGUF file, best in F16, BF16 or F32; of a split, any of its files."
        ),
    ],
    type: Annotated[
        str,
        typer.Option(
            "-t", "--type", metavar="MIX", help="The mix, as llama-quantize names it: Q4_K_M, Q8_0, ..."
        ),
    ],
    output: Annotated[
        str | None,
        typer.Option("-o", "--output", metavar="OUT", help="The file to write.", show_default=False),
    ] = None,
    imatrix: Annotated[
        str | None,
        typer.Option(
            "--imatrix", metavar="FILE", help="Importances of columns (llama-imatrix's file, GGUF or .dat)."
        ),
    ] = None,
    tensor_type: Annotated[
        list[str] | None,
        typer.Option(
            "--tensor-type",
            metavar="PATTERN=TYPE",
            help="The type of tensors in whose name the regular expression is found; repeatable, the first decides.",
            rich_help_panel=_TYPES,
        ),
    ] = None,
    output_type: Annotated[
        str | None,
        typer.Option(
            "--output-type",
            "--output-tensor-type",
            metavar="TYPE",
            help="The type of output.weight.",
            rich_help_panel=_TYPES,
        ),
    ] = None,
    token_embd_type: Annotated[
        str | None,
        typer.Option(
            *("--token-embd-type", "--token-embedding-type"),
            metavar="TYPE",
            help="The type of the token embedding.",
            rich_help_panel=_TYPES,
        ),
    ] = None,
    pure: Annotated[
        bool, typer.Option("--pure", help="The mix's type for every matrix.", rich_help_panel=_TYPES)
    ] = False,
    allow_requantize: Annotated[
        bool,
        typer.Option(
            "--allow-requantize", help="Take tensors that are quantized already; their errors add up."
        ),
    ] = False,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; the bytes are the same on each.")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=4096, help="Threads of the CPU. (default: all cores)", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print each tensor's type and size; write nothing.")
    ] = False,
) -> None:
    """Quantize a GGUF file, with llama-quantize's mixes and rules; metadata is kept.

    OUT appears when it is complete. IQ1, IQ2 and IQ3_XXS need an imatrix (engine imatrix).
    """
    from quengine.cli.loading import chosen_device
    from quengine.cli.terminal import write_line
    from quengine.errors import EngineError

    with interrupts.at_once():
        from quengine.models.quantize.quantize_file import quantize as quantize_file

    if output is None and not dry_run:
        raise EngineError("no file to write: -o OUT, or --dry-run for the sizes alone")
    line = _Line()
    result = quantize_file(
        source,
        None if dry_run else output,
        type,
        imatrix=imatrix,
        tensor_types=tensor_type or (),
        output_type=output_type,
        token_embd_type=token_embd_type,
        pure=pure,
        allow_requantize=allow_requantize,
        device="cpu" if dry_run else chosen_device(device),
        threads=threads,
        progress=line,
    )
    line.clear()
    if dry_run:
        for tensor in result.tensors:
            write_line(_row(tensor))
    for each in _summary(result):
        typer.echo(each, err=True)


class _Line:
    """The tensor that is being quantized, on a terminal."""

    def __init__(self) -> None:
        from quengine.cli.progress import ProgressLine

        self._line = ProgressLine()
        self.clear = self._line.clear

    def __call__(self, tensor: "QuantizedTensor", place: int, count: int) -> None:
        self._line(f"{place + 1} of {count}: {tensor.name}, {tensor.source_type} to {tensor.type_name}")


def _row(tensor: "QuantizedTensor") -> str:
    shape = " x ".join(map(str, tensor.shape))
    kinds = (
        tensor.type_name
        if tensor.type_name == tensor.source_type
        else f"{tensor.source_type} to {tensor.type_name}"
    )
    return f"{tensor.name:40} {shape:>20}  {kinds:16} {tensor.nbytes / 1e6:10.2f} MB"


def _summary(result: "Quantization") -> list[str]:
    from collections import Counter

    from quengine.models.gguf.whole_file import file_size

    counts = Counter(tensor.type_name for tensor in result.tensors)
    types = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    lines = [
        f"{result.mix}: {file_size(result.source_bytes)} to {file_size(result.nbytes)}, "
        f"{result.bits_per_weight:.2f} bits a weight; tensors: {types}"
    ]
    if replaced := [tensor for tensor in result.tensors if tensor.type_name != tensor.wanted_type]:
        first = replaced[0]
        lines.append(
            f"engine: rows are no whole blocks of their types in {_named([tensor.name for tensor in replaced])}: "
            f"{first.shape[-1]} columns, in {first.type_name} instead of {first.wanted_type}"
        )
    if needing := result.needing_imatrix:
        lines.append(f"engine: an imatrix is needed, --imatrix FILE, for {_named(needing)}")
    elif missing := result.without_imatrix:
        lines.append(f"engine: the imatrix has no values for {_named(missing)}")
    lines.append("nothing is written: --dry-run" if result.path is None else f"wrote {result.path}")
    return lines


def _named(tensors: "Sequence[str]") -> str:
    """The only one, or the first and how many there are."""
    return tensors[0] if len(tensors) == 1 else f"{len(tensors)} tensors, such as {tensors[0]}"
