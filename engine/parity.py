"""Whether two ways of running one model give the same logits and the same greedy text.

A side is anything that gives logits for tokens (`Side`); `LLMSide` is a loaded model. Each comparison
streams: at no time are the logits of more than one chunk held. Knows no kernels and prints nothing; what is
measured about a pair of logits is in `parity_metrics`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.llm import LLM
from quengine.load import choose_device
from quengine.models.checkpoint import open_checkpoint
from quengine.models.hub import resolve_model
from quengine.parity_metrics import (
    Budget,
    Comparison,
    Divergence,
    GreedyComparison,
    PhaseMetrics,
    compare_greedy,
)
from quengine.parity_texts import PROMPTS, TEXTS
from quengine.sampling_params import SamplingParams

Phase = Literal["prefill", "decode"]
Progress = Callable[[str], None]

REFERENCE = "reference"
WINDOW = 1024
"""Positions a text is cut into, unless told otherwise: bounds the time and the cache."""

DECODE_SPAN = 64
"""Positions of the decode phase whose logits are held at once; prefill holds a chunk."""

REFERENCE_BUDGETS: Mapping[str, Budget] = {
    "prefill": Budget(nmse_median=2e-6, nmse_p99=5e-5),
    "decode": Budget(nmse_median=5e-8, nmse_p99=1e-6),
    "greedy": Budget(nmse_median=2e-6, nmse_p99=5e-5),
}
"""Against the float64 definition. In "greedy" the prompt comes through prefill, so its budget holds."""

DEVICE_BUDGETS: Mapping[str, Budget] = {
    **REFERENCE_BUDGETS,
    "decode": Budget(nmse_median=1e-8, nmse_p99=1e-6),
}
"""Between two devices: in decode they share the integer sums, and only the float order may differ."""


class Side(Protocol):
    """One of the two runs that are compared."""

    name: str

    def step(self, phase: Phase) -> int:
        """How many tokens the side computes at once in a phase."""
        ...

    def forward(self, ids: list[int], start: int) -> Tensor:
        """Logits [T, vocab] of `ids` at positions start .. start + T - 1, over what is cached before them."""
        ...

    def cached(self, start: int, end: int) -> list[Tensor]:
        """Keys and values of positions start .. end - 1 in every layer, as writable views on the cache."""
        ...

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """At most `count` tokens that a user gets at temperature 0, and the end token if one came sooner."""
        ...

    def continuation(self, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
        """The logits, in blocks [t, vocab], that each of `tokens` follows from after `prompt`."""
        ...


class LLMSide:
    """A loaded model as a side.

    The reference is one definition, not an implementation of phases: it always runs in chunks, which is
        quick.
    """

    def __init__(self, name: str, llm: LLM) -> None:
        self.name = name
        self.llm = llm
        self.decoder = llm.runner.decoder

    def step(self, phase: Phase) -> int:
        return 1 if phase == "decode" and self.name != REFERENCE else self.decoder.chunk_size

    def forward(self, ids: list[int], start: int) -> Tensor:
        # What the cache says it holds is no longer true.
        self.llm.runner.cache.tokens.clear()
        return self.llm.runner.forward(ids, start, last_only=False)

    def cached(self, start: int, end: int) -> list[Tensor]:
        return [rows[start:end] for layer in self.llm.runner.cache.layers for rows in (layer.k, layer.v)]

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        completion = self.llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=count)).finish()
        if completion.finish_reason != "stop":
            return completion.tokens
        # The end token is a choice like any other, which a completion does not show.
        *_, last = self.continuation(prompt, [*completion.tokens, 0])
        ended_by = max(sorted(self.llm.tokenizer.eos_ids), key=lambda token: float(last[-1, token]))
        return [*completion.tokens, ended_by]

    def continuation(self, prompt: list[int], tokens: list[int]) -> Iterator[Tensor]:
        for start in range(0, len(prompt), self.decoder.chunk_size):
            last = self.llm.runner.forward(prompt[start : start + self.decoder.chunk_size], start)
        yield last
        step = self.step("decode")
        for first in range(0, len(tokens) - 1, step):
            yield self.forward(tokens[:-1][first : first + step], len(prompt) + first)


def default_sides() -> tuple[str, str]:
    """The pair that is compared when none is named: a GPU with the CPU where there is one, else the
    definition.
    """
    device, _ = choose_device(EngineConfig())
    return ("cpu", "cuda") if device.type == "cuda" else (REFERENCE, "cpu")


def check_sides(a: str, b: str) -> None:
    """Raises EngineError for a name that is no side; whether it can run here shows when it is loaded."""
    for name in (a, b):
        kind, _, index = name.partition(":")
        if name not in (REFERENCE, "cpu", "cuda") and (kind != "cuda" or not index.isdecimal()):
            raise EngineError(f"side {name!r}: must be reference, cpu, cuda or cuda:N")


def budgets_for(a: str, b: str) -> Mapping[str, Budget]:
    """The limits that hold between two sides."""
    return REFERENCE_BUDGETS if REFERENCE in (a, b) else DEVICE_BUDGETS


@dataclass(frozen=True)
class Workload:
    """What both sides are fed: token ids of teacher-forced texts and of prompts to continue greedily.

    `ctx_size` holds the longest of them; `texts` counts texts before they were cut into windows.
    """

    windows: list[list[int]]
    prompts: list[list[int]]
    tokens: int
    texts: int
    ctx_size: int


def built_in_texts(count: int | None = None) -> list[str]:
    """The first `count` built-in texts, after the last of which comes all of them in one; None: every one."""
    texts = [text for _, text in TEXTS]
    return [*texts, "\n\n".join(texts)][:count]


def plan_workload(
    model: str | Path, texts: list[str], prompts: int, tokens: int, window: int = WINDOW
) -> Workload:
    """Encode texts and the first `prompts` built-in prompts with the model's tokenizer.

    Texts longer than `window` positions, or than the model's context, are cut into windows that are
    computed one by one.

    Raises:
        EngineError: no such model, a count out of range, or nothing to compare.
    """
    for name, value, low, high in (
        ("--prompts", prompts, 0, len(PROMPTS)),
        ("--tokens", tokens, 1, 1 << 20),
        ("--window", window, 2, 1 << 20),
    ):
        if not low <= value <= high:
            raise EngineError(f"{name} {value}: must be in {low}..{high}")
    checkpoint = open_checkpoint(resolve_model(str(model)))
    try:
        tokenizer, context = checkpoint.tokenizer(), checkpoint.config.context_length
    finally:
        checkpoint.close()
    encoded = [tokenizer.encode(text, bos=tokenizer.add_bos) for text in texts]
    size = min(window, context)
    windows = [ids[start : start + size] for ids in encoded for start in range(0, len(ids), size)]
    prompt_ids = [tokenizer.encode(text, bos=tokenizer.add_bos) for text in PROMPTS[:prompts]]
    if not windows and not prompt_ids:
        raise EngineError("nothing to compare: the texts have no tokens and --prompts is 0")
    if any(len(ids) >= context for ids in prompt_ids):
        raise EngineError(
            f"the model's context of {context} tokens is too small for the built-in prompts; use --prompts 0"
        )
    longest = max([*map(len, windows), *(len(ids) + tokens for ids in prompt_ids)])
    return Workload(windows, prompt_ids, tokens, len(texts), min(longest + 1, context))


@dataclass(frozen=True)
class ParityReport:
    """What was measured between sides `a` and `b`, and whether it is within the budgets.

    phases: "prefill", "decode" and "greedy" (the logits along the greedy texts), as far as they were run.
    failures: one phrase for each thing outside its budget; empty means parity holds.
    """

    a: str
    b: str
    phases: dict[str, PhaseMetrics]
    budgets: Mapping[str, Budget]
    divergences: list[Divergence]
    identical_prompts: int
    prompts: int
    generated: int

    @property
    def failures(self) -> list[str]:
        found = [
            f"{name}: {excess}"
            for name, metrics in self.phases.items()
            for excess in metrics.excesses(self.budgets[name])
        ]
        wide = sum(not divergence.near_tie for divergence in self.divergences)
        if wide:
            found.append(
                f"greedy: {wide} of {len(self.divergences)} divergences are wider than twice the largest "
                f"logit difference there"
            )
        return found

    @property
    def within(self) -> bool:
        return not self.failures


def compare_sides(a: Side, b: Side, workload: Workload, progress: Progress) -> ParityReport:
    """Run the whole comparison; `progress` is told in a few words what is being computed."""
    phases: dict[str, PhaseMetrics] = {}
    names: tuple[Phase, ...] = ("prefill", "decode")
    for phase in names if workload.windows else ():
        phases[phase] = _teacher_forced(a, b, workload.windows, phase, progress).metrics()
    greedy = list(_free_running(a, b, workload, progress))
    rows = Comparison([row for result in greedy for row in result.comparison.rows])
    if greedy:
        phases["greedy"] = rows.metrics()
    found = [divergence for result in greedy for divergence in result.divergences]
    return ParityReport(
        a=a.name,
        b=b.name,
        phases=phases,
        budgets={name: budgets_for(a.name, b.name)[name] for name in phases},
        divergences=found,
        identical_prompts=sum(not result.divergences for result in greedy),
        prompts=len(greedy),
        generated=sum(len(row) for row in rows.rows),
    )


def _teacher_forced(
    a: Side, b: Side, windows: list[list[int]], phase: Phase, progress: Progress
) -> Comparison:
    comparison = Comparison()
    for index, ids in enumerate(windows):
        progress(f"{phase}: text {index + 1} of {len(windows)}, {len(ids)} tokens")
        span = DECODE_SPAN if phase == "decode" else max(a.step(phase), b.step(phase))
        for start in range(0, len(ids), span):
            block = ids[start : start + span]
            logits_a = torch.cat([a.forward(part, at) for part, at in _parts(block, start, a.step(phase))])
            logits_b = []
            for part, at in _parts(block, start, b.step(phase)):
                logits_b.append(b.forward(part, at))
                _force_cache(a, b, at, at + len(part), comparison)
            comparison.add(logits_a, torch.cat(logits_b))
    return comparison


def _parts(ids: list[int], start: int, step: int) -> Iterator[tuple[list[int], int]]:
    """Pieces of at most `step` tokens, each with its position."""
    for first in range(0, len(ids), step):
        yield ids[first : first + step], start + first


@torch.no_grad()
def _force_cache(a: Side, b: Side, start: int, end: int, comparison: Comparison) -> None:
    """Compare the rows just cached, then give b those of a: the next step starts from the same state on
    both sides.

    A cache in fp16 turns the last bit of a correct side into a whole step of fp16 now and then. Left alone,
    those steps add up to more than what is to be measured (docs/parity.md has the numbers).
    """
    for rows_a, rows_b in zip(a.cached(start, end), b.cached(start, end), strict=True):
        comparison.add_cached(rows_a, rows_b)
        rows_b.copy_(rows_a)


def _free_running(a: Side, b: Side, workload: Workload, progress: Progress) -> Iterator[GreedyComparison]:
    """Side b generates freely; both are then asked for the logits along its text.

    Up to the first difference this is what a would have generated too, so nothing is lost by not running a
    freely, and the slow side computes whole chunks instead of single tokens.
    """
    for index, prompt in enumerate(workload.prompts):
        progress(f"greedy: prompt {index + 1} of {len(workload.prompts)}")
        tokens = b.greedy(prompt, workload.tokens)
        yield compare_greedy(index, tokens, a.continuation(prompt, tokens), b.continuation(prompt, tokens))


class SidePair(AbstractContextManager["SidePair"]):
    """Two loaded sides of one model; closing it lets both go.

    Raises:
        EngineError: the model is wrong, or a name is no side.
        CannotRunError: a side cannot run on this machine.
    """

    def __init__(self, model: str | Path, a: str, b: str, ctx_size: int, threads: int | None = None) -> None:
        check_sides(a, b)
        self.a = LLMSide(a, _load(model, a, ctx_size, threads))
        try:
            self.b = LLMSide(b, _load(model, b, ctx_size, threads))
        except BaseException:
            self.a.llm.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.a.llm.close()
        self.b.llm.close()


def _load(model: str | Path, side: str, ctx_size: int, threads: int | None) -> LLM:
    if side == REFERENCE:
        return LLM(model, "cpu", ctx_size, threads, backend=REFERENCE)
    return LLM(model, side, ctx_size, threads)
