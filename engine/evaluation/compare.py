"""Compares a model with another on the same tokens, chunk by chunk; nothing is stored.

Model a's logits for a part of a chunk (at most `_HELD_BYTES`) are held while model b computes the same part. A file of
log-probabilities from llama-perplexity may take the place of a.
"""

import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quengine.errors import EngineError
from quengine.evaluation.divergence import FileDivergence, TokenRows, rows_of_logits, rows_of_stored
from quengine.evaluation.logits_file import LogitsFile, is_logits_file
from quengine.scoring.perplexity import DEFAULT_CTX, text_chunks
from quengine.scoring.prompt_logits import PromptLogits, ScoredTokens, compute

if TYPE_CHECKING:
    from torch import Tensor

    from quengine.llm import LLM

_HELD_BYTES = 256 << 20
"""The most bytes of model a's fp32 logits that are held at once."""

Progress = Callable[[FileDivergence], None]


class Base(Protocol):
    """The model or file with which a model is compared."""

    name: str

    def begin(self, number: int, ids: Seq[int], first: int) -> None:
        """Begins a part of chunk `number`: the rows of positions `first` .. len(ids) - 1."""
        ...

    def rows(self, logits: "Tensor", position: int, targets: Seq[int]) -> TokenRows:
        """The values of `targets`, given the other model's logits from `position` on, which are overwritten."""
        ...


class ModelBase:
    """A model as the base."""

    def __init__(self, llm: "LLM") -> None:
        self.name, self.llm = llm.loaded.path.name, llm
        self._parts = list["Tensor"]()
        self._first = 0

    def begin(self, number: int, ids: Seq[int], first: int) -> None:
        del number
        self._parts.clear()
        self._first = first
        for _ in compute(self.llm, [PromptLogits(ids, first, self._take)]):
            pass

    def _take(self, logits: "Tensor", position: int) -> None:
        del position
        self._parts.append(logits.clone())

    def rows(self, logits: "Tensor", position: int, targets: Seq[int]) -> TokenRows:
        import torch

        if len(self._parts) > 1:
            self._parts = [torch.cat(self._parts)]
        start = position - self._first
        own = self._parts[0][start : start + len(logits)].to(logits.device, copy=True)
        return rows_of_logits(own, logits, targets)


class FileBase:
    """A file of log-probabilities as the base."""

    def __init__(self, file: LogitsFile) -> None:
        self.name, self._file, self._number = file.path.name, file, 0

    def begin(self, number: int, ids: Seq[int], first: int) -> None:
        del ids, first
        self._number = number

    def rows(self, logits: "Tensor", position: int, targets: Seq[int]) -> TokenRows:
        first = position - self._file.ctx // 2
        own = self._file.logprobs(self._number, first, len(logits), logits.device)
        return rows_of_stored(own, logits, targets)


def measure(base: Base, llm: "LLM", chunks: Seq[ScoredTokens], ctx: int) -> Iterator[FileDivergence]:
    """The divergence of a model from the base after each of the chunks.

    Raises:
        EngineError: a chunk does not fit the context, or logits are not finite.
    """
    began, parts = time.perf_counter(), list[TokenRows]()
    name = llm.loaded.path.name
    for number, chunk in enumerate(chunks):
        parts.append(_chunk_rows(base, llm, number, chunk))
        check_finite(parts[-1], number, chunk.first)
        parts = [TokenRows.joined(parts)]
        seconds = time.perf_counter() - began
        yield FileDivergence(base.name, name, parts[0], number + 1, len(chunks), ctx, seconds)


def _chunk_rows(base: Base, llm: "LLM", number: int, chunk: ScoredTokens) -> TokenRows:
    found = list[TokenRows]()
    for ids, first in parts_of(chunk, llm.model_config.vocab_size):
        base.begin(number, ids, first)
        found.append(part_rows(base, llm, chunk, ids, first))
    return TokenRows.joined(found)


def parts_of(chunk: ScoredTokens, vocab: int) -> Iterator[tuple[list[int], int]]:
    """The parts of a chunk, as (prompt, first position whose logits are wanted), small enough to hold their logits."""
    last, most = len(chunk.ids) - 1, max(1, _HELD_BYTES // (4 * vocab))
    for first in range(chunk.first - 1, last, most):
        yield chunk.ids[: min(first + most, last)], first


def part_rows(base: Base, llm: "LLM", chunk: ScoredTokens, ids: list[int], first: int) -> TokenRows:
    """The values of the tokens after positions `first` .. len(ids) - 1 of a chunk. `base.begin` was called for them."""
    found = list[TokenRows]()

    def take(logits: "Tensor", position: int) -> None:
        found.append(base.rows(logits, position, chunk.ids[position + 1 : position + 1 + len(logits)]))

    for _ in compute(llm, [PromptLogits(ids, first, take)]):
        pass
    return TokenRows.joined(found)


def check_finite(rows: TokenRows, chunk: int, first: int) -> None:
    """Raises EngineError where a value of a chunk is not finite. chunk: its number, from 0. first: the position of its
    first scored token."""
    import numpy as np

    for values in (rows.nll_a, rows.nll_b, rows.kl):
        for place in np.flatnonzero(~np.isfinite(values))[:1].tolist():
            raise EngineError(
                f"logits before token {first + place} of chunk {chunk + 1} are not finite: a model file may be "
                "damaged, or the backend is at fault: try --backend reference"
            )


def check_tokens(a: "LLM", b: "LLM", text: str) -> None:
    """Raises EngineError where two models do not have the same tokens."""
    sizes = a.model_config.vocab_size, b.model_config.vocab_size
    if sizes[0] != sizes[1]:
        raise EngineError(
            f"{a.loaded.path.name} has a vocabulary of {sizes[0]} tokens, {b.loaded.path.name} one of {sizes[1]}: "
            "models with the same tokens can be compared"
        )
    ids = a.encode(text), b.encode(text)
    if ids[0] != ids[1]:
        at = next(
            (n for n, pair in enumerate(zip(*ids, strict=False)) if pair[0] != pair[1]), min(map(len, ids))
        )
        raise EngineError(
            f"the text's tokens differ from token {at} on: models with the same tokens can be compared"
        )


def file_chunks(file: LogitsFile, llm: "LLM") -> list[ScoredTokens]:
    """The chunks of a file of log-probabilities. Raises EngineError where their tokens are of another vocabulary."""
    vocab = llm.model_config.vocab_size
    if file.vocab != vocab:
        raise EngineError(
            f"{file.path}: of a vocabulary of {file.vocab} tokens, {llm.loaded.path.name} has {vocab}"
        )
    for token in (token for ids in file.chunks for token in ids if not 0 <= token < vocab):
        raise EngineError(
            f"{file.path}: token id {token} is not in the vocabulary of {vocab}: a damaged file"
        )
    bos = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    heads = [ids[:1] if bos is None else [bos] for ids in file.chunks]
    return [
        ScoredTokens(head + ids[1:], file.ctx // 2 + 1) for head, ids in zip(heads, file.chunks, strict=True)
    ]


class FileComparison:
    """Two models, or a file and a model, opened for a comparison; use it in a `with` statement.

    Args:
        a: the base: a model, or a file of llama-perplexity's `--kl-divergence-base`.
        b: the model that is compared with it.
        text: None: the text of the file.
        ctx: tokens of a chunk; a file has its own number.
        load: makes an LLM of a model, for a context.

    `llm` is model b; `other` is model a, or None if a is a file.

    Raises:
        EngineError: a model or a file is wrong, they do not have the same tokens, or the text is too short.
    """

    def __init__(self, a: str, b: str, text: str | None, ctx: int, load: "Callable[[str, int], LLM]") -> None:
        stored = LogitsFile(Path(a)) if is_logits_file(Path(a)) else None
        if (stored is None) == (text is None):
            what = (
                "its tokens are the file's: leave the text out (-f)"
                if stored
                else "no text: give one with -f FILE"
            )
            raise EngineError(f"{a}: {what}")
        self.ctx = ctx if stored is None else stored.ctx
        with ExitStack() as stack:
            self.llm = stack.enter_context(load(b, self.ctx))
            self.base: Base
            self.other: LLM | None = None
            if stored is not None:
                self.base, self.chunks = FileBase(stored), file_chunks(stored, self.llm)
            else:
                assert text is not None
                self.other = stack.enter_context(load(a, self.ctx))
                check_tokens(self.other, self.llm, text)
                self.base, self.chunks = ModelBase(self.other), text_chunks(self.llm, text, ctx)
            self._stack = stack.pop_all()

    def __enter__(self) -> "FileComparison":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def measure(self, chunks: int | None = None) -> Iterator[FileDivergence]:
        """The divergence after each chunk. chunks: how many, at most; None: all."""
        return measure(self.base, self.llm, self.chunks[:chunks], self.ctx)


def compare(
    a: str | Path,
    b: str | Path,
    text: str | None = None,
    ctx: int = DEFAULT_CTX,
    *,
    chunks: int | None = None,
    progress: Progress | None = None,
    **config: Any,
) -> FileDivergence:
    """How far model b's predictions are from model a's on a text.

    Args:
        a: the base: a model, or a file of llama-perplexity's `--kl-divergence-base`, which brings its own text.
        b: the model that is compared with it.
        text: cut into chunks of `ctx` tokens as `perplexity` does.
        chunks: how many are computed, at most; None: all.
        progress: called after each chunk.
        config: fields of `EngineConfig`, for both models.

    Raises:
        EngineError: a model or a file is wrong, they do not have the same tokens, or the text is too short.
    """
    from quengine.llm import LLM

    def load(model: str, size: int) -> LLM:
        return LLM(model, ctx_size=size, **{"reuse_prefix": True} | config)

    with FileComparison(str(a), str(b), text, ctx, load) as comparison:
        found = None
        for found in comparison.measure(chunks):
            if progress is not None:
                progress(found)
    if found is None:
        raise EngineError("no chunk to compute: chunks must be at least 1")
    return found
