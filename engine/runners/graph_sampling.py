"""Sampling settings as captured decode steps take them: what a graph must have room for, and a sequence's numbers.

Knows requests; not graphs, nor how a token is chosen.
"""

from dataclasses import dataclass
from typing import Protocol

from quengine.kernels.cuda.sampling.sampling import MAX_CAPACITY, Settings
from quengine.request.sampling_params import SamplingParams
from quengine.sampler import Sampler


class Sampled(Protocol):
    """What samples: a sequence, or drafts for one."""

    @property
    def params(self) -> SamplingParams: ...

    @property
    def sampler(self) -> Sampler: ...


@dataclass(frozen=True)
class GraphKey:
    """What a graph is captured for: candidates kept for sampling (0: all), and whether bias and penalties have room."""

    top_k: int
    bias: bool
    penalties: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "GraphKey | None":
        """None where the settings cannot be sampled in a graph."""
        if params.logprobs is not None or params.constraint is not None:
            return None
        kept = next((room for room in (64, MAX_CAPACITY) if 1 <= params.top_k <= room), 0)
        return cls(1 if params.greedy else kept, bool(params.logit_bias), params.penalizes)

    def union(self, other: "GraphKey") -> "GraphKey":
        """Room for what either has room for."""
        top_k = max(self.top_k, other.top_k) if self.top_k and other.top_k else 0
        return GraphKey(top_k, self.bias or other.bias, self.penalties or other.penalties)

    def covers(self, other: "GraphKey") -> bool:
        return self.union(other) == self


GREEDY = GraphKey(1, bias=False, penalties=False)


def settings_of(sequence: Sampled) -> Settings:
    """How a sequence samples, as the device takes it."""
    params = sequence.params
    return Settings(
        temperature=params.temperature,
        top_k=1 if params.greedy else params.top_k,
        typical_p=params.typical_p,
        top_p=params.top_p,
        min_p=params.min_p,
        repeat=params.repeat_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repeat_last_n=params.repeat_last_n,
        seed=sequence.sampler.seed,
        stream=sequence.sampler.stream,
    )
