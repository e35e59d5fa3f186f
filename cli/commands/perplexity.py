"""`engine perplexity`: how well a model predicts a text, or answers multiple-choice tasks, as llama-perplexity counts.

The result goes to standard output, progress to standard error.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from quengine.cli import interrupts
from quengine.cli.flags import Model, takes_options
from quengine.cli.progress import ProgressLine
from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.options import OUTPUT, Flag, Only, Range
from quengine.platform.input_files import read_bytes, read_text

if TYPE_CHECKING:
    from quengine.evaluation.tasks import Accuracy, TaskKind
    from quengine.llm import LLM
    from quengine.scoring.perplexity import Perplexity

TEXT, TASKS = "The text", "Tasks in place of a text"
RUN_OPTIONS = Only(
    *("device", "threads", "backend", "chunk_size", "cache_type", "deterministic", "mmap", "cpu_moe"),
    *("n_cpu_moe", "gpu_experts", "tensor_parallel", "expert_parallel", "devices", "split", "tensor_split"),
)
"""Options of a model that computes prompts alone."""
_WITH_ADAPTERS = Only(*RUN_OPTIONS.names, "lora")

_TASK_PROMPTS = 16
"""Choices that are computed at the same time."""


TextFiles = Annotated[
    tuple[Path, ...], Flag("-f --file", "A text; several are joined, with an empty line between them.", TEXT)
]
MostChunks = Annotated[
    int | None, Range(1), Flag("--chunks", "Chunks to compute, at most. (default: all)", TEXT, "N")
]


@dataclass(frozen=True)
class PerplexityFlags:
    """What is computed, and how it is reported."""

    files: TextFiles = ()
    ctx: Annotated[
        int,
        Range(4),
        Flag("-c --ctx --ctx-size", "Tokens of a chunk, whose second half is scored.", TEXT),
    ] = 512
    stride: Annotated[
        int,
        Range(0),
        Flag("--stride --ppl-stride", "Windows that overlap, begun every N tokens; 0: none.", TEXT, "N"),
    ] = 0
    chunks: MostChunks = None
    hellaswag: Annotated[Path | None, Flag("--hellaswag", "A HellaSwag file: six lines a task.", TASKS)] = (
        None
    )
    winogrande: Annotated[Path | None, Flag("--winogrande", "A WinoGrande file: CSV.", TASKS)] = None
    multiple_choice: Annotated[
        Path | None, Flag("--multiple-choice", "A file of ARC, MMLU or TruthfulQA: binary.", TASKS)
    ] = None
    tasks: Annotated[
        int | None,
        Range(1),
        Flag("--tasks", "Tasks to draw of them, at most. (default: all; 400 of HellaSwag)", TASKS, "N"),
    ] = None
    as_json: Annotated[bool, Flag("--json", "Print one JSON object.", OUTPUT)] = False

    def __post_init__(self) -> None:
        given = [
            "--file" if name == "files" else f"--{name.replace('_', '-')}"
            for name in ("files", *_KINDS)
            if getattr(self, name) not in (None, ())
        ]
        if len(given) != 1:
            what = "give one of them" if given else "give a text (-f FILE), or a file of tasks"
            raise EngineError(f"{' and '.join(given) or 'nothing to compute'}: {what}")
        if self.files and self.tasks is not None:
            raise EngineError(f"--tasks {self.tasks}: it goes with a file of tasks, not with a text")
        for name in ("stride", "chunks"):
            if not self.files and (value := getattr(self, name)):
                raise EngineError(f"--{name} {value}: it goes with a text, not with {given[0]}")

    @property
    def task_file(self) -> "tuple[TaskKind, Path] | None":
        """The file of tasks and their kind."""
        return next(((kind, path) for name, kind in _KINDS.items() if (path := getattr(self, name))), None)


_KINDS: "dict[str, TaskKind]" = {
    "hellaswag": "hellaswag",
    "winogrande": "winogrande",
    "multiple_choice": "multiple-choice",
}


@takes_options
def perplexity(flags: PerplexityFlags, config: Annotated[EngineConfig, _WITH_ADAPTERS], model: Model) -> None:
    """Perplexity of a text, or the accuracy in multiple-choice tasks; both with their error."""
    if flags.task_file is not None:
        _answer(flags, config, model, *flags.task_file)
        return
    text = joined_texts(flags.files)
    from quengine.cli.loading import load_llm

    with interrupts.at_once():
        from quengine.scoring.perplexity import measure, text_chunks
        from quengine.scoring.prompt_logits import parallel_prompts

    size = flags.ctx + flags.stride // 2
    config = replace(config, ctx_size=size, parallel=parallel_prompts(size))
    with load_llm(model, config) as llm:
        chunks = text_chunks(llm, text, flags.ctx, flags.stride)[: flags.chunks]
        found = last_shown(measure(llm, chunks, flags.ctx, flags.stride), _running)
        _print(flags, llm, _fields(found), _lines(found))


def joined_texts(files: tuple[Path, ...]) -> str:
    """The texts of files, without the newline at the end, as llama.cpp's tools read one. Raises EngineError."""
    return "\n\n".join(read_text(path, "cannot read the text from").removesuffix("\n") for path in files)


Result = TypeVar("Result")


def last_shown(results: "Iterator[Result]", line: Any) -> Result:
    """The last of the results; the `line` of each is shown while the next one is computed."""
    progress = ProgressLine()
    try:
        for found in results:
            progress(line(found))
    finally:
        progress.clear()
    return found


def time_left(seconds: float) -> str:
    """For the user: "40 s left"."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"


def _answer(flags: PerplexityFlags, config: EngineConfig, model: str, kind: "TaskKind", path: Path) -> None:
    with interrupts.at_once():
        from quengine.evaluation.tasks import answer, read_tasks

    tasks = read_tasks(kind, read_bytes(path, f"cannot read the tasks of --{kind} from"), flags.tasks)
    from quengine.cli.loading import load_llm

    with load_llm(model, replace(config, ctx_size=flags.ctx, parallel=_TASK_PROMPTS)) as llm:
        found = last_shown(answer(llm, kind, tasks), _answered)
        low, high = found.interval
        lines = [
            f"{kind}: {100 * found.accuracy:.4f}% +/- {100 * found.error:.4f}% right, of {found.done} tasks",
            f"95% interval: {100 * low:.4f}% to {100 * high:.4f}%; by chance {100 * found.chance:.4f}%",
            f"{found.computed_tokens} tokens in {found.seconds:.1f} s, {found.tokens_per_second:.0f} tok/s",
        ]
        fields = {name: value for name, value in asdict(found).items() if name != "scores"}
        for name in ("accuracy", "error", "interval", "chance", "tokens_per_second"):
            fields[name] = getattr(found, name)
        _print(flags, llm, fields, lines)


def _answered(found: "Accuracy") -> str:
    low, high = found.interval
    return (
        f"{found.done} of {found.total}: {100 * found.accuracy:.2f}% right [{100 * low:.2f}%, {100 * high:.2f}%], "
        f"{found.tokens_per_second:.0f} tok/s, {time_left(found.seconds_left)}"
    )


def _running(found: "Perplexity") -> str:
    value = found.perplexity
    return (
        f"chunk {found.chunks} of {found.total_chunks}: perplexity {value.value:.4f} +/- {value.error:.4f}, "
        f"{found.tokens_per_second:.0f} tok/s, {time_left(found.seconds_left)}"
    )


def _lines(found: "Perplexity") -> list[str]:
    value = found.perplexity
    windows = f", windows of {found.ctx + found.stride // 2}" if found.stride else ""
    return [
        f"perplexity: {value.value:.4f} +/- {value.error:.5f}",
        f"{found.scored_tokens} tokens scored in {found.chunks} chunks, context {found.ctx}, "
        f"stride {found.stride or found.ctx}{windows}",
        f"{found.computed_tokens} tokens in {found.seconds:.1f} s, {found.tokens_per_second:.0f} tok/s",
    ]


def _fields(found: "Perplexity") -> dict[str, Any]:
    value, nll = found.perplexity, found.nll
    fields = asdict(found) | {"perplexity": value.value, "perplexity_error": value.error}
    return fields | {"nll": nll.value, "nll_error": nll.error, "tokens_per_second": found.tokens_per_second}


def _print(flags: PerplexityFlags, llm: "LLM", fields: dict[str, Any], lines: list[str]) -> None:
    from quengine.cli.terminal import json_line, write_line

    if flags.as_json:
        about = {"model": llm.loaded.path.name, "device": str(llm.loaded.device)}
        print(json_line(about | fields))
        return
    for line in lines:
        write_line(line)
