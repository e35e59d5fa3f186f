"""`engine imatrix`: importances of a model's columns from a text, for `engine quantize --imatrix`."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from quengine.cli import interrupts
from quengine.cli.commands.perplexity import TEXT, MostChunks, TextFiles, joined_texts, last_shown, time_left
from quengine.cli.flags import Model, takes_options
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import Flag, Only, Range

if TYPE_CHECKING:
    from quengine.evaluation.imatrix import ImatrixRun

FILE = "The file"
_OPTIONS = Only(
    *("device", "threads", "backend", "chunk_size", "cache_type", "mmap"),
    *("tensor_parallel", "devices", "split", "tensor_split"),
)


@dataclass(frozen=True)
class ImatrixFlags:
    """Of which text, and what is written."""

    files: TextFiles = ()
    ctx: Annotated[int, Range(4), Flag("-c --ctx --ctx-size", "Tokens of a chunk.", TEXT)] = 512
    chunks: MostChunks = None
    from_chunk: Annotated[
        int, Range(0), Flag("--from-chunk --chunk", "Leave out this many chunks of the text.", TEXT, "N")
    ] = 0
    output: Annotated[
        Path | None,
        Flag("-o --output --output-file", "The file to write, in llama-imatrix's GGUF format.", FILE, "FILE"),
    ] = None
    earlier: Annotated[
        tuple[Path, ...],
        Flag("--in-file", "Add to the sums of this file, GGUF or .dat; repeatable.", FILE, "FILE"),
    ] = ()
    save_every: Annotated[
        int,
        Range(0),
        Flag("--save-every --save-frequency", "Write it every N chunks too; 0: at the end.", FILE, "N"),
    ] = 0
    resume: Annotated[
        bool, Flag("--resume", "Go on where the file that is there ends, if there is one.", FILE)
    ] = False

    def __post_init__(self) -> None:
        if not self.files and not self.earlier:
            raise EngineError("no text: give one with -f FILE, or files to add with --in-file FILE")
        if not self.files:
            for flag, given in (
                ("--chunks", self.chunks is not None),
                ("--from-chunk", self.from_chunk),
                ("--save-every", self.save_every),
                ("--resume", self.resume),
            ):
                if given:
                    raise EngineError(f"{flag} is of a text, and there is none: -f FILE")
        if self.output is None:
            raise EngineError("no file to write: -o imatrix.gguf")


@takes_options
def imatrix(
    flags: ImatrixFlags,
    config: Annotated[EngineConfig, _OPTIONS],
    model: Model = "",
) -> None:
    """Compute importances of columns: the inputs of each matrix on a text, squared and summed.

    Values are llama-imatrix's. FILE appears when it is complete; with --save-every also on the way, so that --resume
    goes on from there after an interruption. Without -f, FILE has the sums of all --in-file; no model is needed.
    """
    with interrupts.at_once():
        from quengine.models.quantize.imatrix import read_sums

    assert flags.output is not None
    if flags.files and not model:
        raise EngineError("no model: -m MODEL")
    if model and not flags.files:
        raise EngineError(f"-m {model}: no text for it: -f FILE; files are added without a model")
    text = joined_texts(flags.files)
    before = [read_sums(path) for path in flags.earlier]
    if not flags.files:
        from quengine.evaluation.imatrix import add_files

        add_files(before, flags.output)
        files = "1 file" if len(before) == 1 else f"{len(before)} files"
        print(f"{files} added; wrote {flags.output}", file=sys.stderr)
        return
    from quengine.cli.loading import load_llm

    with load_llm(model, replace(config, ctx_size=flags.ctx)) as llm:
        from quengine.evaluation.imatrix import chosen_chunks, collect

        chunks = chosen_chunks(llm, text, flags.ctx, flags.from_chunk, flags.chunks)
        dataset = ", ".join(map(str, flags.files))
        runs = collect(
            *(llm, chunks, flags.output, flags.ctx, dataset),
            first=flags.from_chunk,
            before=before,
            resume=flags.resume,
            save_every=flags.save_every,
        )
        found = last_shown(runs, _running)
    for line in _lines(found):
        print(line, file=sys.stderr)


def _running(found: "ImatrixRun") -> str:
    return (
        f"chunk {found.chunks} of {found.total_chunks}: {found.tokens_per_second:.0f} tok/s, "
        f"{time_left(found.seconds_left)}"
    )


def _lines(found: "ImatrixRun") -> list[str]:
    begun = f", {found.begun} of them before" if found.begun else ""
    chunks = "1 chunk" if found.chunks == 1 else f"{found.chunks} chunks"
    lines = [
        f"{found.tensors} tensors, {chunks} of {found.ctx} tokens{begun}, in {found.seconds:.1f} s, "
        f"{found.tokens_per_second:.0f} tok/s"
    ]
    if found.untouched:
        lines.append(f"engine: no token was routed to {found.untouched} experts: give a longer text")
    return [*lines, f"wrote {found.path}"]
