"""Functions that parity, bench and the self-test share.

They open, load and greedily run a model, compare results with those of the definition, or of another side, and hold
the difference against a limit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quengine.config import EngineConfig
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.hub.hub import resolve_model
from quengine.request.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quengine.llm import LLM


@contextmanager
def opened(model: str | Path) -> Iterator[Checkpoint]:
    """A block with a model's checkpoint, which is closed at its end. Raises EngineError if there is none."""
    checkpoint = open_checkpoint(resolve_model(str(model)))
    try:
        yield checkpoint
    finally:
        checkpoint.close()


def loaded(model: str | Path, config: EngineConfig, **changes: Any) -> "LLM":
    """Loads the model with these options, after some `changes` to them. Raises as `LLM` does."""
    from quengine.llm import LLM  # the self-test does without

    return LLM(model, **vars(replace(config, **changes)))


def greedy(count: int | None, ignore_eos: bool = True) -> SamplingParams:
    """Parameters of a greedy request of `count` tokens; None: until the context is full. It ends with an end token
    unless these are ignored."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=ignore_eos)


def in_parts(ids: list[int], start: int, size: int) -> Iterator[tuple[list[int], int]]:
    """Pieces of at most `size` tokens, each with its position; the first one is at `start`."""
    for first in range(0, len(ids), size):
        yield ids[first : first + size], start + first


def nmse(found: Tensor, wanted: Tensor) -> float:
    """Normalized mean squared error of a whole result; NaN where it is not finite."""
    return float((found.cpu().double() - wanted.double()).square().mean() / wanted.double().square().mean())


def nmse_rows(a: Tensor, b: Tensor, size: Tensor, free: Tensor | float = 0.0) -> Tensor:
    """||a - b||^2 / ||size||^2 of each row, fp64 [T]: 0 where a equals b, infinite where it is no number. Differences
    count only as far as they exceed `free`.
    """
    if isinstance(free, Tensor):
        free = free.to("cpu", torch.float64).flatten(1)
    a, b, size = (rows.to("cpu", torch.float64).flatten(1) for rows in (a, b, size))
    error = ((a - b).abs() - free).clamp(min=0).square().sum(dim=1) + (a - b).sum(dim=1) * 0
    return torch.where(error == 0, 0.0, error / size.square().sum(dim=1)).nan_to_num(nan=float("inf"))


def percentile(values: Tensor, percent: float) -> float:
    """The smallest value that at least `percent` of `values` do not exceed; NaN when there are none."""
    if not len(values):
        return float("nan")
    rank = -(-len(values) * percent // 100)
    return float(values.sort().values[max(0, int(rank) - 1)])


def spread(values: Tensor) -> tuple[float, float, float]:
    """The median, the 99th percentile and the maximum."""
    median, p99, most = (percentile(values, percent) for percent in (50, 99, 100))
    return median, p99, most


def excesses(measured: Iterable[tuple[str, float, float]]) -> list[str]:
    """A phrase for each named value that is over its limit, or no number."""
    return [
        f"{name} {value:.2g} is over {limit:.2g}" for name, value, limit in measured if not value <= limit
    ]


@dataclass(frozen=True)
class KernelCheck:
    """One test of one subject (a weight format, or an operation). `error` is NMSE; NaN where the kernel's result was
    not finite, or where it could not be run: `note` then has the reason.
    """

    subject: str
    test: str
    error: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def checked(
    subject: str, test: str, limit: float, results: Callable[[], tuple[Tensor, Tensor]]
) -> KernelCheck:
    """Compares a kernel's result with that of the definition, which `results` computes; an exception is a failure."""
    try:
        return KernelCheck(subject, test, nmse(*results()), limit)
    except Exception as error:  # anything that stops a kernel
        return failure(subject, test, error)


def failure(subject: str, test: str, error: Exception) -> KernelCheck:
    """The check of something that could not be run."""
    reason = (str(error).strip().splitlines() or [""])[0]
    return KernelCheck(subject, test, float("nan"), 0.0, f"{type(error).__name__}: {reason}")
