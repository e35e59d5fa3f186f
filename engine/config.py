"""What a run is asked to be: one frozen record, checked once."""

from dataclasses import dataclass
from pathlib import Path

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType

DEFAULT_CHUNK = {"cpu": 512, "cuda": 2048}
"""Prompt tokens computed at once by kind of device. A GPU expands its weights anew for every chunk."""

MIXED_CHUNK = {"cpu": 256, "cuda": 512}
"""The most prompt tokens computed at once while other sequences wait for their next token, by kind of device."""

MIXED_SECONDS = {"cpu": 0.2, "cuda": None}
"""How long such a chunk may take, going by the last one. On a GPU its length would change the bits, and 512 tokens are
computed in the time of a few decode steps."""

MOST_DRAFT_NGRAM = 16
"""Each length of run up to the longest has a table of its own."""

MOST_DRAFT_TOKENS = 31
"""With the newest token 32 rows of a step, for one sequence."""


@dataclass(frozen=True)
class EngineConfig:
    """How a model is to be run.

    Attributes:
        device: "auto", "cpu", "cuda" or "cuda:N".
        ctx_size: positions of a sequence in the key/value cache; None: the model's own, cut to what fits in memory.
        threads: CPU threads; None: the physical cores.
        backend: "auto" (the packed kernels of the device) or "reference" (the float64 definition).
        chunk_size: the most prompt tokens computed at once; None: what suits the device.
        reuse_prefix: take blocks that hold the beginning of a prompt already, of earlier requests or of those beside
            it. Always so where `parallel` is more than 1.
        cache_type: how keys and values are stored, "f16" or "q8_0" (17/32 of the memory, rounded to 8 bits).
        deterministic: a sequence's logits are the same to the last bit however its prompt was chunked, whatever was
            computed before and beside it. It costs that answers are not taken for the beginning of later prompts, nor
            computed again in chunks when a sequence had lost its blocks. The CPU computes so anyway; a GPU takes one
            family of kernels for every number of rows then, which slows prompts and a single sequence
            (docs/performance.md).
        parallel: most sequences computed at once. They share a cache of `parallel * ctx_size` positions, or of what
            fits in memory.
        draft_model: a small model with the same vocabulary that drafts tokens for this one to check; None: none does.
        draft_ngram: tokens of the longest run that is looked up in a text, for what followed it there, as a draft, and
            of shorter ones down to half of it; 0: nothing is looked up. Comes before a draft model, if there are both.
        draft_tokens: tokens of a draft at most; None: what suits the device.
        mmap: on the CPU, compute with the mapped file's pages; else with a copy of the weights in huge pages, which is
            a few percent faster and takes its time at the start.

    Raises:
        EngineError: a value is outside its range.
    """

    device: str = "auto"
    ctx_size: int | None = None
    threads: int | None = None
    backend: str = "auto"
    chunk_size: int | None = None
    reuse_prefix: bool = False
    cache_type: CacheType = "f16"
    deterministic: bool = False
    parallel: int = 1
    draft_model: str | Path | None = None
    draft_ngram: int = 0
    draft_tokens: int | None = None
    mmap: bool = True

    @property
    def speculates(self) -> bool:
        """Whether tokens are drafted."""
        return self.draft_model is not None or self.draft_ngram > 0

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
            raise EngineError(f"device {self.device!r}: must be auto, cpu, cuda or cuda:N")
        if self.backend not in ("auto", "reference"):
            raise EngineError(f"backend {self.backend!r}: must be auto or reference")
        if self.cache_type not in CACHE_TYPES:
            raise EngineError(f"cache type {self.cache_type!r}: must be {' or '.join(CACHE_TYPES)}")
        for name in ("ctx_size", "threads", "chunk_size", "parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise EngineError(f"{name} {value}: must be at least 1")
        if not 0 <= self.draft_ngram <= MOST_DRAFT_NGRAM:
            raise EngineError(
                f"draft_ngram {self.draft_ngram}: must be 0 (no look-up) to {MOST_DRAFT_NGRAM} tokens"
            )
        if self.draft_tokens is not None and not 1 <= self.draft_tokens <= MOST_DRAFT_TOKENS:
            raise EngineError(f"draft_tokens {self.draft_tokens}: must be from 1 to {MOST_DRAFT_TOKENS}")
        if self.draft_tokens is not None and not self.speculates:
            raise EngineError(
                f"draft_tokens {self.draft_tokens}: nothing drafts; ask for a draft model (--draft-model) or look-up "
                f"(--draft-ngram)"
            )
