"""The two runs that parity compares: what it asks of each, and a loaded model as one.

Knows how a model is loaded and fed; not what is measured.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.kernels.backend import prompt_scope
from quengine.kernels.cache_types import CacheType
from quengine.llm import LLM
from quengine.load import choose_device
from quengine.sampling_params import SamplingParams

Phase = Literal["prefill", "decode"]

REFERENCE = "reference"


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
        """What is stored of positions start .. end - 1 in every layer, as writable views: keys and values, or in
        q8_0 their codes and scales.
        """
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

    @torch.no_grad()
    def eager(self, ids: list[int], start: int) -> Tensor:
        """As `forward`, one operation of the backend after the other: no recorded step."""
        self.llm.runner.cache.tokens.clear()
        backend = self.decoder.backend
        tokens = torch.tensor(ids, device=backend.device)
        with prompt_scope(backend) if len(ids) > 1 else nullcontext():
            return self.decoder.forward(tokens, self.llm.runner.cache.layers, start, last_only=False)

    def cached(self, start: int, end: int) -> list[Tensor]:
        return [rows[start:end] for layer in self.llm.runner.cache.layers for rows in layer.tensors]

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


class SidePair(AbstractContextManager["SidePair"]):
    """Two loaded sides of one model; closing it lets both go.

    Raises:
        EngineError: the model is wrong, or a name is no side.
        CannotRunError: a side cannot run on this machine.
    """

    def __init__(
        self,
        model: str | Path,
        a: str,
        b: str,
        ctx_size: int,
        threads: int | None = None,
        cache_type: CacheType = "f16",
    ) -> None:
        check_sides(a, b)
        self.a = LLMSide(a, _load(model, a, ctx_size, threads, cache_type))
        try:
            self.b = LLMSide(b, _load(model, b, ctx_size, threads, cache_type))
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


def default_sides() -> tuple[str, str]:
    """The pair that is compared when none is named: a GPU with the CPU where there is a usable one, else the
    CPU with the definition.
    """
    device, _ = choose_device(EngineConfig())
    return ("cpu", "cuda") if device.type == "cuda" else (REFERENCE, "cpu")


def check_sides(a: str, b: str) -> None:
    """Raises EngineError for a name that is no side; whether it can run here shows when it is loaded."""
    for name in (a, b):
        kind, _, index = name.partition(":")
        if name not in (REFERENCE, "cpu", "cuda") and (kind != "cuda" or not index.isdecimal()):
            raise EngineError(f"side {name!r}: must be reference, cpu, cuda or cuda:N")


def _load(model: str | Path, side: str, ctx_size: int, threads: int | None, cache_type: CacheType) -> LLM:
    if side == REFERENCE:
        return LLM(model, "cpu", ctx_size, threads, backend=REFERENCE, cache_type=cache_type)
    return LLM(model, side, ctx_size, threads, cache_type=cache_type)
