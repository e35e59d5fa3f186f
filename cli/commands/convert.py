"""`engine convert`: a Hugging Face folder as a GGUF file."""

import re
from typing import TYPE_CHECKING, Annotated

import typer

from quengine.cli import interrupts

if TYPE_CHECKING:
    from quengine.models.gguf.writer import TensorInfo

_UNITS = {"": 1, "K": 1000, "M": 1000**2, "G": 1000**3}


def convert(
    folder: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER",
            help="With config.json, *.safetensors and the tokenizer, or an adapter's with adapter_config.json.",
        ),
    ],
    output: Annotated[
        str, typer.Option("-o", "--output", "--outfile", metavar="OUT", help="The file to write.")
    ],
    type: Annotated[
        str | None,
        typer.Option(
            *("-t", "--type", "--outtype"),
            metavar="TYPE",
            help="f32, f16, bf16 or q8_0. (default: f16; of an adapter f32)",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="FOLDER",
            help="The folder of the model of a LoRA adapter; only config.json is read. (default: the one that "
            "adapter_config.json names)",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            *("--target", "--target-model-dir"),
            metavar="FOLDER",
            help="The folder of the model that an EAGLE-3 draft model drafts for.",
        ),
    ] = None,
    mmproj: Annotated[
        bool, typer.Option("--mmproj", help="Write the projector of a model with vision, not its text model.")
    ] = False,
    split_max_size: Annotated[
        str | None,
        typer.Option(
            "--split-max-size", metavar="SIZE", help="Several files, each of at most so much: 500M, 4G."
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads", min=1, max=4096, help="Threads of the CPU. (default: all cores)", show_default=False
        ),
    ] = None,
) -> None:
    """Convert a Hugging Face folder to GGUF: tensors and metadata as llama.cpp's converter writes them.

    A folder of PEFT becomes a GGUF adapter. OUT appears when it is complete. Other types: engine quantize.
    """
    from quengine.cli.progress import ProgressLine
    from quengine.models.gguf.whole_file import file_size

    with interrupts.at_once():
        from quengine.models.convert.convert_folder import convert as convert_folder

    line = ProgressLine()

    def show(tensor: "TensorInfo", place: int, count: int) -> None:
        line(f"{place + 1} of {count}: {tensor.name} in {tensor.type_name}")

    most = None if split_max_size is None else _size(split_max_size)
    result = convert_folder(
        folder,
        output,
        type,
        base=base,
        target_folder=target,
        mmproj=mmproj,
        split_max_size=most,
        threads=threads,
        progress=show,
    )
    line.clear()
    typer.echo(f"{result.architecture}: {len(result.tensors)} tensors, {file_size(result.nbytes)}", err=True)
    for path in result.paths:
        typer.echo(f"wrote {path}", err=True)


def _size(text: str) -> int:
    """Bytes of "500M" or "4G", in powers of 1000 as llama.cpp's converter counts. Raises EngineError."""
    from quengine.errors import EngineError

    found = re.fullmatch(r"([1-9]\d{0,9})([KMG]?)", text.upper())
    if found is None:
        raise EngineError(f"--split-max-size {text}: must be a size, as 500M or 4G")
    return int(found[1]) * _UNITS[found[2]]
