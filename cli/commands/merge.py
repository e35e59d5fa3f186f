"""`engine merge`: LoRA adapters added to a GGUF file's weights."""

from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli import interrupts

if TYPE_CHECKING:
    from quengine.models.quantize.quantize_file import QuantizedTensor


def merge(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model's GGUF file; of a split, any of its files.")
    ],
    lora: Annotated[
        list[str],
        typer.Option(
            "--lora",
            metavar="FILE[:SCALE]",
            help="An adapter (GGUF file or folder of PEFT) and its scale (1 where left out); repeatable.",
        ),
    ],
    output: Annotated[
        str, typer.Option("-o", "--output", metavar="OUT", help="The file to write.", show_default=False)
    ],
    type: Annotated[
        str | None,
        typer.Option(
            *("-t", "--type"),
            metavar="MIX",
            help="Types of all matrices, as engine quantize has them: F16, Q8_0, Q4_K_M, ... (default: as stored)",
            show_default=False,
        ),
    ] = None,
    imatrix: Annotated[
        str | None,
        typer.Option("--imatrix", metavar="FILE", help="Importances of columns, for what is quantized."),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", help="auto, cpu, cuda or cuda:N; sums may differ in their last bits.")
    ] = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=4096, help="Threads of the CPU. (default: all cores)", show_default=False
        ),
    ] = None,
) -> None:
    """Add LoRA adapters to a model's weights and write them as a new file.

    Changed tensors are dequantized, the adapters' products added, and quantized to their types again; OUT appears when
    it is complete.
    """
    from quengine.cli.loading import chosen_device
    from quengine.cli.progress import ProgressLine
    from quengine.models.gguf.whole_file import file_size

    with interrupts.at_once():
        from quengine.models.lora.merge import merge as merge_file

    line = ProgressLine()

    def show(tensor: "QuantizedTensor", place: int, count: int) -> None:
        line(f"{place + 1} of {count}: {tensor.name} in {tensor.type_name}")

    result = merge_file(
        source,
        lora,
        output,
        type,
        imatrix=imatrix,
        device=chosen_device(device),
        threads=threads,
        progress=show,
    )
    line.clear()
    sizes = f"{file_size(result.source_bytes)} to {file_size(result.nbytes)}"
    typer.echo(f"{len(result.merged)} of {len(result.tensors)} tensors changed; {sizes}", err=True)
    typer.echo(f"wrote {result.path}", err=True)
