"""An importance matrix of a model from a text, as llama-imatrix makes it: sums of squares of what each matrix reads.

The text is cut into chunks as for a perplexity, and all tokens of a chunk count. Experts count the tokens that are
routed to them.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from quengine.errors import EngineError
from quengine.models.gguf.whole_file import check_disk
from quengine.models.quantize.imatrix import ImatrixSums, Sums, added_sums, each_text, read_sums, write_sums
from quengine.parallel.group import RankFailedError
from quengine.parallel.observed_inputs import written_sums
from quengine.parallel.wire import ObserveInputs, WriteSums
from quengine.scoring.perplexity import DEFAULT_CTX, text_chunks
from quengine.scoring.prompt_logits import ScoredTokens

if TYPE_CHECKING:
    from quengine.llm import LLM


@dataclass(frozen=True)
class ImatrixRun:
    """How far a run is.

    Attributes:
        chunks, total_chunks: chunks done, and all chunks of the run; both include those of a resumed run.
        begun: chunks that an earlier run has done.
        tensors: the number of tensors with values; 0 if nothing was written after this chunk. untouched: the number of
            experts, in all layers, that no token was routed to; 0 before the last chunk.
        seconds: time of the computation, without loading.
    """

    path: Path
    chunks: int
    total_chunks: int
    begun: int
    ctx: int
    tensors: int
    untouched: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens per second."""
        return (self.chunks - self.begun) * self.ctx / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Time that the remaining chunks take at this speed."""
        done = self.chunks - self.begun
        return self.seconds * (self.total_chunks - self.chunks) / done if done else 0.0


Progress = Callable[[ImatrixRun], None]


def collect(
    llm: "LLM",
    chunks: Seq[ScoredTokens],
    path: Path,
    ctx: int,
    dataset: str,
    *,
    first: int = 0,
    before: Seq[ImatrixSums] = (),
    resume: bool = False,
    save_every: int = 0,
) -> Iterator[ImatrixRun]:
    """Computes the chunks and writes the file; yields after each chunk.

    Args:
        dataset: the text's name, for the file.
        first: the number of chunks of the text that are skipped before these.
        before: sums of other files, to which these are added.
        resume: continue where an unfinished file at `path`, of the same text and chunks, ends.
        save_every: write the file after each so many chunks; 0: only at the end.

    Raises:
        EngineError: the file to resume is of other texts; sums to add to are of another model; activations are not
            finite; or the file's folder is missing.
        CannotRunError: too little free disk.
    """
    check_disk(path, 0)  # before the computation
    began, done = time.perf_counter(), 0
    inputs = _Inputs(llm)
    earlier, added = list(before), sum(each.chunks_of(ctx) for each in before)
    if resume and path.exists():
        datasets = (*(name for each in before for name in each.datasets), dataset)
        earlier = [_resumed(path, datasets, ctx, first, added)]
        done = earlier[0].chunks - added
        if done >= len(chunks):
            raise EngineError(
                f"{path}: has {earlier[0].chunks} chunks already, of {added + len(chunks)} to compute: give more with "
                "--chunks, or leave --resume out"
            )
    begun = done
    for number in range(begun, len(chunks)):
        with inputs.collecting():
            llm.embed(chunks[number].ids, "last")  # all tokens through all layers
        done += 1
        last, sums = done == len(chunks), dict[str, Sums]()
        if last or (save_every and done % save_every == 0):
            sums = inputs.sums()
            mine = ImatrixSums(sums, () if resume and begun else (dataset,), done - begun, ctx)
            write_sums(path, replace(added_sums([*earlier, mine], ctx), first=first, added=added))
        seconds = time.perf_counter() - began
        untouched = _untouched(sums) if last else 0
        yield ImatrixRun(path, done, len(chunks), begun, ctx, len(sums), untouched, seconds)


class _Inputs:
    """The sums over the inputs of a model's matrices, on all ranks. Raises EngineError as `Collector` does."""

    def __init__(self, llm: "LLM") -> None:
        from quengine.evaluation.activations import Collector

        self._runner = llm.runner
        self._own = Collector(llm.loaded.decoder, llm.loaded.checkpoint.tensors, llm.ctx_size)
        self._run = str(uuid4())

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """A context in which the inputs of all that the model computes are added to the sums."""
        with self._runner.together(ObserveInputs(self._run, True)):
            pass
        try:
            with self._own.collecting():
                yield
        finally:
            with suppress(RankFailedError), self._runner.together(ObserveInputs(self._run, False)):
                pass

    def sums(self) -> dict[str, Sums]:
        """The sums so far. Raises EngineError for activations that are not finite."""
        own = self._own.sums()
        if (ranks := self._runner.ranks) is None:
            return own
        with TemporaryDirectory(prefix="quengine-sums-") as folder:  # mode 0700
            with ranks.together(WriteSums(folder)):
                ranks.meet()
            return own | written_sums(Path(folder))


def _resumed(path: Path, datasets: Seq[str], ctx: int, first: int, added: int) -> ImatrixSums:
    """The sums of an unfinished file of these texts from chunk `first` on, after `added` chunks of other files."""
    found = read_sums(path)
    if found.chunk_size != ctx or found.datasets != each_text(datasets):
        names = ", ".join(found.datasets) or "no text"
        raise EngineError(
            f"{path}: is of {names} in chunks of {found.chunk_size}, not of {', '.join(datasets)} in chunks of {ctx}: "
            "give another file to write, or leave --resume out"
        )
    if found.added != added:
        raise EngineError(
            f"{path}: has {found.added} chunks of added files, not {added}: resume with the same --in-file"
        )
    if found.first != first:
        raise EngineError(
            f"{path}: leaves out {found.first} chunks of the text, not {first}: resume with --from-chunk {found.first}"
        )
    return found


def _untouched(sums: Mapping[str, Sums]) -> int:
    """The number of experts without a token, counted by their down matrices."""
    return sum(int((each.counts == 0).sum()) for name, each in sums.items() if ".ffn_down" in name)


def chosen_chunks(llm: "LLM", text: str, ctx: int, from_chunk: int, most: int | None) -> list[ScoredTokens]:
    """The chunks of a text to compute: `most` of them after the first `from_chunk`. Raises EngineError for none."""
    chunks = text_chunks(llm, text, ctx)
    if from_chunk >= len(chunks):
        raise EngineError(f"from chunk {from_chunk}: the text has {len(chunks)} chunks of {ctx} tokens")
    if not (chosen := chunks[from_chunk:][:most]):
        raise EngineError(f"chunks {most}: must be 1 or more")
    return chosen


def add_files(before: Seq[ImatrixSums], path: Path) -> ImatrixRun:
    """Writes the sums of files into one. Raises EngineError: of several models, or no file."""
    if not before:
        raise EngineError("neither a text nor files to add")
    added = added_sums(before)
    write_sums(path, added)
    chunks = added.chunks
    return ImatrixRun(path, chunks, chunks, chunks, added.chunk_size, len(added.sums), 0, 0.0)


def imatrix(
    model: "LLM | str | Path | None",
    text: str,
    path: str | Path,
    ctx: int = DEFAULT_CTX,
    *,
    dataset: str = "text",
    chunks: int | None = None,
    from_chunk: int = 0,
    in_files: Seq[str | Path] = (),
    save_every: int = 0,
    resume: bool = False,
    progress: Progress | None = None,
    **config: Any,
) -> ImatrixRun:
    """Writes an importance matrix of a model from a text, as `engine imatrix` does.

    Args:
        model: an LLM whose context holds a chunk, or what `LLM` takes as a model. None: no text is read, and the file
            has only the sums of `in_files`.
        text: what the model reads, cut into chunks.
        path: the file, in llama-imatrix's GGUF format; it appears when it is complete.
        ctx: tokens of a chunk.
        dataset: the name of the text that is written into the file.
        chunks: most chunks to compute; None: all.
        from_chunk: the number of chunks of the text to skip before them.
        in_files: imatrix files, in either format, whose sums are added.
        save_every: write the file after each so many chunks; 0: only at the end.
        resume: continue where an unfinished file at `path`, of the same text and chunks, ends.
        progress: called after each chunk.
        config: fields of `EngineConfig`, for a model that is loaded here.

    Raises:
        EngineError: the text is too short, a file is of another model, or activations are not finite.
        CannotRunError: too little free disk.
    """
    from quengine.llm import LLM

    for name, value in (("from_chunk", from_chunk), ("save_every", save_every)):
        if value < 0:
            raise EngineError(f"{name} {value}: must be 0 or more")
    before = [read_sums(Path(each)) for each in in_files]
    if model is None:
        if text:
            raise EngineError("a text, and no model to read it")
        return add_files(before, Path(path))

    def run(llm: LLM) -> ImatrixRun:
        parts = chosen_chunks(llm, text, ctx, from_chunk, chunks)
        runs = collect(
            *(llm, parts, Path(path), ctx, dataset),
            first=from_chunk,
            before=before,
            resume=resume,
            save_every=save_every,
        )
        for found in runs:
            if progress is not None:
                progress(found)
        return found

    if isinstance(model, LLM):
        return run(model)
    with LLM(model, ctx_size=ctx, **config) as llm:
        return run(llm)
