"""What a benchmark times: the tests, and the options of the run."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from quengine.config import RUN_PANEL, EngineConfig
from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.options import OUTPUT, Flag, Only

TESTS = "Tests"
LISTS = "Lists: 128,512 or the flag repeated."


def whole_numbers(flag: str, texts: Seq[str]) -> tuple[int, ...]:
    """The numbers in all texts of a flag, which have commas between them. Raises EngineError for anything else."""
    parts = [part.strip() for text in texts for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise EngineError(
            f"{flag} {','.join(texts)}: must be whole numbers with commas between, such as 128,512"
        )
    return tuple(map(int, parts))


@dataclass(frozen=True)
class BenchTest:
    """What is timed: a prompt of `prompt` tokens, then `generate` tokens one by one, after `depth` tokens that are not
    timed. One of the first two may be 0.
    """

    prompt: int
    generate: int
    depth: int = 0

    @property
    def name(self) -> str:
        """As llama-bench writes it: pp512, tg128, pp512+tg128, with "@ d4096" at a depth."""
        parts = [f"pp{self.prompt}"] if self.prompt else []
        parts += [f"tg{self.generate}"] if self.generate else []
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def positions(self) -> int:
        """Positions of the cache that the test needs; one token more than it counts."""
        return self.depth + self.prompt + self.generate + 1


def expand_tests(
    prompts: Seq[int], generates: Seq[int], pairs: Seq[tuple[int, int]], depths: Seq[int]
) -> list[BenchTest]:
    """At every depth: the prompt tests, the generation tests, the pairs of both. Zeros are left out.

    Raises:
        EngineError: nothing is left, or a number is negative.
    """
    shapes = [*((p, 0) for p in prompts), *((0, n) for n in generates), *pairs]
    if any(number < 0 for number in (*depths, *(n for shape in shapes for n in shape))):
        raise EngineError("-p, -n, -pg and -d take numbers of tokens, 0 or more")
    tests = [BenchTest(p, n, depth) for depth in depths for p, n in shapes if p or n]
    if not tests:
        raise EngineError("nothing to time: -p, -n and -pg are all 0")
    return list(dict.fromkeys(tests))


@dataclass(frozen=True)
class BenchPlan:
    """Everything to be timed: each model, with each thread count (None: the physical cores), shared by each number of
    ranks, in each test.

    The tests decide the positions, sequences and threads of `config`.

    Raises:
        EngineError: a value is out of its range, or two of them exclude each other.
    """

    models: Seq[str | Path] = ()
    tests: Seq[BenchTest] = ()
    repetitions: Annotated[int, Flag("-r --repetitions", "Times each test is run.", TESTS)] = 5
    batches: Annotated[
        tuple[int, ...],
        Flag(
            "-b --batch-size",
            f"Sequences at once. {LISTS} (default: 1)",
            TESTS,
            read=partial(whole_numbers, "-b"),
        ),
    ] = (1,)
    threads: Annotated[
        tuple[int | None, ...],
        Flag(
            "-t --threads",
            "CPU threads. (default: physical cores)",
            RUN_PANEL,
            read=partial(whole_numbers, "-t"),
        ),
    ] = (None,)
    ranks: Annotated[
        tuple[int, ...],
        Flag(
            "--tensor-parallel -tp",
            "Devices that share the model: each number is timed. (default: 1)",
            RUN_PANEL,
            "N",
            read=partial(whole_numbers, "--tensor-parallel"),
        ),
    ] = (1,)
    profile: Annotated[
        bool, Flag("--profile", "Also print each kernel's time on the device (CUDA).", OUTPUT)
    ] = False
    trace: Annotated[
        Path | None,
        Flag("--trace", "Write those times as a timeline (Chrome trace format).", OUTPUT, "FILE"),
    ] = None
    warm_up: Annotated[bool, Flag("--warmup/--no-warmup", "Run each test once before.", TESTS)] = True
    config: Annotated[
        EngineConfig,
        Only(
            *("device", "backend", "cache_type", "deterministic", "mmap"),
            *(
                "draft_model",
                "draft_ngram",
                "draft_mtp",
                "draft_vocab",
                "draft_tokens",
                "cpu_moe",
                "n_cpu_moe",
                "gpu_experts",
                "expert_parallel",
            ),
            *("split", "tensor_split", "lora"),
        ),
    ] = field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        for flag, least in (
            ("-r", self.repetitions),
            ("-b", min(self.batches)),
            ("--tensor-parallel", min(self.ranks)),
            ("-t", min(self.threads, key=lambda n: n or 0)),
        ):
            if least is not None and least < 1:
                raise EngineError(f"{flag} {least}: must be at least 1")
        if self.config.draft_mtp is None:  # the figures are of the model alone, unless drafts are requested
            object.__setattr__(self, "config", replace(self.config, draft_mtp=0))
        if self.config.speculates and self.profiled:
            raise EngineError("--profile and --trace time steps without drafts; leave out the --draft flags")
        if max(self.batches) > 1 and self.profiled and any(test.prompt for test in self.tests):
            raise EngineError(
                "--profile and --trace time one prompt at a time; with -b, leave prompts out (-p 0)"
            )
        for test in self.tests:
            if test.prompt and test.depth % BLOCK_SIZE:
                raise EngineError(
                    f"-d {test.depth}: must be a multiple of {BLOCK_SIZE}, whole blocks of the cache, "
                    "where prompts are timed; -p 0 times generation alone"
                )

    @property
    def profiled(self) -> bool:
        """Whether the kernels of each test are timed."""
        return self.profile or self.trace is not None
