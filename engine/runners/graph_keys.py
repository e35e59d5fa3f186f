"""The sizes of captured steps, in one table, and the key that identifies a captured step."""

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from quengine.kernels.phase import Phase
from quengine.request.sampling_params import SamplingParams

DECODE_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 384, 512)
"""Rows of a captured decode step: matmuls take 8 rows at a time, above 128 rows blocks of 128 or 256 (192
take longer than 256), and from 16 on a padding row costs little besides the weights.
"""

PREFILL_ROWS = (16, 32, 64, 128, 256, 384, 512, 640, 768, 896, 1024)
"""Rows of a captured prefill step. A step has some 300 launches of 10 to 100 us of host time each: with fewer
than 500 to 1000 rows the GPU waits for them. Matmuls take 8, 16, 32, 64 or 128 rows, or a multiple of 128, at
a time, so padding rows cost nearly nothing.
"""

WHOLE_CHUNK = 2048
"""Rows of a further captured step of one prompt, where ranks share a model: a chunk that is whole, or nearly. Several
devices compute it sooner than a busy host launches its kernels: for a 7B model two H200s take 35 ms, or up to 48 if
kernels are launched one by one.
"""

LEAST_OF_CHUNK = 1921
"""Rows from which on a chunk is nearly whole: its padding takes at most a sixteenth of the step."""

PREFILL_SEQUENCES = (1, 4, 16, 64)
"""Sequences of a captured prefill step: a burst of chat messages has some 20 in 1024 rows."""

_FEW_SEQUENCES = 16
"""Prefill steps of up to this many sequences are captured, however few sequences run at once."""

CAPTURED_AT = 2
"""Occurrences of a prefill step's size until it is captured, unless it was captured ahead or, for several
sequences, a captured step holds it.
"""

WHOLE_CAPTURED_AT = 8
"""The same for whole chunks. Launching the kernels of so many one by one loses about as much time as a capture takes.
"""

MOST_PADDING = 1024
"""The most padding rows, over all occurrences of an uncaptured size, with which its steps run in larger captured ones:
a row takes some 0.03 ms, a capture 30. While sequences join or leave, a size occurs for a step or two.
"""

EXACT_CPU_ROWS = 16
"""Rows up to which a CPU decode step has its own step list; larger ones are padded to a multiple of 4."""

CANDIDATES = (64, 128)
"""Candidates that sampling in a graph may keep; above the largest, or without a top-k, every token is a candidate."""

UNMOVED_ROWS = 128
"""Rows up to which decode steps use memory that the backend never replaces by a larger allocation."""


_ALIGNED_ROWS = 8
"""Rows are padded to a multiple of this, so that each vector starts where a kernel may load 16 bytes at a time."""


class SamplingKind(NamedTuple):
    """The buffers of a decode step's sampling: candidates kept (0: all), bias, penalties."""

    top_k: int
    bias: bool
    penalties: bool

    @classmethod
    def of(cls, params: SamplingParams) -> "SamplingKind | None":
        """The kind for these settings; None if they are sampled on the host."""
        if (
            params.logprobs is not None
            or params.constraint is not None
            or params.logits_processors
            or params.min_tokens
            or params.chained
        ):
            return None
        kept = next((most for most in CANDIDATES if 1 <= params.top_k <= most), 0)
        return cls(1 if params.greedy else kept, bool(params.logit_bias), params.penalizes)

    def union(self, other: "SamplingKind") -> "SamplingKind":
        """The kind with buffers for both."""
        top_k = max(self.top_k, other.top_k) if self.top_k and other.top_k else 0
        return SamplingKind(top_k, self.bias or other.bias, self.penalties or other.penalties)


GREEDY = SamplingKind(1, bias=False, penalties=False)


class GraphKey(NamedTuple):
    """The key of a captured step: padded numbers of rows and sequences, and the sampling in it (None: it returns
    logits).

    In decode every row counts as a sequence. shares: a sequence may have several rows of a decode step, as with drafts
    (`ForwardBatch.shares_sequences`): its kernels are slower than those of a step without. adapted: rows may have LoRA
    adapters (`ForwardBatch.adapters`), whichever.
    """

    phase: Phase
    rows: int
    sequences: int
    sampling: SamplingKind | None = None
    shares: bool = False
    adapted: bool = False

    def holds(self, other: "GraphKey") -> bool:
        """Whether a step of this key can run a step of the other."""
        ours, theirs = ((key.phase, key.sampling, key.shares, key.adapted) for key in (self, other))
        same = ours == theirs
        return same and self.rows >= other.rows and self.sequences >= other.sequences


def decode_key(rows: int, sampling: SamplingKind | None = None, shares: bool = False) -> GraphKey:
    """The key of a decode step. A single row shares its sequence with no other."""
    return GraphKey("decode", rows, rows, sampling, shares and rows > 1)


def padded_rows(rows: int) -> int:
    """The smallest captured number of decode rows that is at least `rows`."""
    return next(size for size in DECODE_ROWS if size >= rows)


def aligned(rows: int) -> int:
    """`rows`, rounded up so that an int32 vector of them ends where a kernel may load 16 bytes at a time."""
    return -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS


def prefill_key(lengths: list[int], whole_chunks: bool = False) -> GraphKey | None:
    """The key of a step of prompts' chunks of these lengths; None if it is not captured. whole_chunks: nearly whole
    chunks of one prompt are captured, too (WHOLE_CHUNK).
    """
    count = sum(lengths)
    if whole_chunks and len(lengths) == 1 and LEAST_OF_CHUNK <= count <= WHOLE_CHUNK:
        return GraphKey("prefill", WHOLE_CHUNK, 1)
    rows = next((size for size in PREFILL_ROWS if size >= count), None)
    sequences = next((size for size in PREFILL_SEQUENCES if size >= len(lengths)), None)
    if rows is None or sequences is None or count < 2:
        return None
    return GraphKey("prefill", rows, sequences)


def expected_keys(
    most_decode_rows: int, chunk_size: int, *mixed_rows: int, whole_chunks: bool = False
) -> list[GraphKey]:
    """The keys of the steps of ordinary requests, largest first.

    Decode steps of up to `most_decode_rows` rows, greedy and with default settings, and the largest of them with a
    bias; chunks of one prompt of up to `chunk_size` tokens, and of several prompts in steps of `mixed_rows`.
    whole_chunks: see `prefill_key`.
    """
    whole = [GraphKey("prefill", WHOLE_CHUNK, 1)] if whole_chunks and chunk_size >= LEAST_OF_CHUNK else []
    keys = [GraphKey("prefill", rows, 1) for rows in PREFILL_ROWS if rows <= chunk_size]
    mixed, several = [rows for rows in mixed_rows if rows in PREFILL_ROWS], _several(most_decode_rows)
    keys += [GraphKey("prefill", rows, sequences) for rows in mixed for sequences in several]
    keys = whole + keys[::-1]
    keys += decode_keys(most_decode_rows, SamplingParams(temperature=0), SamplingParams())
    return keys + [key for key in biased_keys(most_decode_rows) if key.rows == padded_rows(most_decode_rows)]


def rarer_keys(most_decode_rows: int, prefill_tokens: int) -> list[GraphKey]:
    """Further keys worth capturing: several prompts of up to `prefill_tokens` tokens together, and decode
    steps of up to `most_decode_rows` rows with a bias (which `ignore_eos` is).
    """
    keys = [
        GraphKey("prefill", rows, sequences)
        for sequences in _several(most_decode_rows)
        for rows in PREFILL_ROWS
        if sequences <= rows <= prefill_tokens
    ]
    return keys + biased_keys(most_decode_rows)


def _several(most_sequences: int) -> list[int]:
    """The sizes, in sequences, of captured prefill steps of several prompts, if at most so many run at once."""
    most = max(most_sequences, _FEW_SEQUENCES)
    return [size for before, size in pairwise(PREFILL_SEQUENCES) if before < most]


def biased_keys(most_rows: int) -> list[GraphKey]:
    """The keys of decode steps of up to `most_rows` rows with a bias, greedy and with default settings."""
    bias = {0: 0.0}
    return decode_keys(
        most_rows, SamplingParams(logit_bias=bias), SamplingParams(temperature=0, logit_bias=bias)
    )


def decode_keys(most_rows: int, *settings: SamplingParams) -> list[GraphKey]:
    """The keys of decode steps of up to `most_rows` rows with these settings, largest first.

    Steps with rows that the host samples use the greedy ones.
    """
    kinds = dict.fromkeys(SamplingKind.of(params) or GREEDY for params in settings)
    sizes = DECODE_ROWS[: DECODE_ROWS.index(padded_rows(most_rows)) + 1]
    return [decode_key(rows, kind) for kind in kinds for rows in reversed(sizes)]


def sharing_keys(keys: Iterable[GraphKey]) -> list[GraphKey]:
    """The keys of decode steps of the same sizes in which a sequence may have several rows."""
    return [key._replace(shares=True) for key in keys if key.phase == "decode" and key.rows > 1]
