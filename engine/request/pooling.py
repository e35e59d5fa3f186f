"""Embeddings: the hidden rows of a text pooled into one vector of unit length, or as they are."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

from quengine.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

    from quengine.models.config import ModelConfig, Ranker, Task
    from quengine.models.tokenizer import Tokenizer

Pooling = Literal["mean", "cls", "last", "none"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)
RANK: Literal["rank"] = "rank"
"""The pooling of a pair of texts by a model with a trained head: the head's outputs for the first or last position."""


def default_pooling(own: str | None) -> Pooling:
    """The pooling where a request names none: the model's own (`ModelConfig.pooling`), or the mean.

    Raises:
        EngineError: the model's own is none of POOLINGS.
    """
    found = next((pooling for pooling in POOLINGS if pooling == (own or "mean")), None)
    if found is None:
        raise EngineError(
            f"pooling: this model was made for {own!r}, to score pairs of texts (LLM.rank, POST /v1/rerank); "
            "ask for mean, cls or last"
        )
    return found


def ranks_pairs(config: "ModelConfig") -> bool:
    """Whether the model has a trained head that gives a pair of texts one score."""
    if (ranker := config.ranker) is not None:
        return ranker.softmax or ranker.classes == 1
    return config.encoder is not None and config.encoder.classes == 1


def pair_ids(tokenizer: "Tokenizer", ranker: "Ranker", query: str, document: str) -> list[int]:
    """The prompt of a pair for a decoder that ranks. Control tokens in the pair's texts are encoded as plain text."""
    return tokenizer.encode_hidden(ranker.template, lambda part: ranker.filled(part, query, document))


def tasks_of(config: "ModelConfig") -> "Sequence[Task]":
    """The tasks that the model has adapters for."""
    return () if config.encoder is None else config.encoder.tasks


def task_prefix(tasks: "Sequence[Task]", task: str | None) -> str:
    """The prefix of texts that are embedded for a task. Raises EngineError for a task that is not in `tasks`."""
    if task is None:
        return ""
    found = next((each.prefix for each in tasks if each.name == task), None)
    if found is None:
        there = f"it has {', '.join(each.name for each in tasks)}" if tasks else "it has none"
        raise EngineError(f"task {task}: this model has no adapter for it; {there}")
    return found


def check_ranks(config: "ModelConfig") -> None:
    """Raises EngineError where the model does not rank pairs of texts."""
    sizes = config.encoder or config.ranker
    classes = 0 if sizes is None else sizes.classes
    if not ranks_pairs(config):
        has = f"a head of {classes} outputs" if classes else "no trained head"
        raise EngineError(
            f"a model that ranks has a head of one output, and this {config.architecture} has {has}"
        )


def with_end(ids: list[int], end: int | None) -> list[int]:
    """A text's ids, with the model's end token (`Tokenizer.end_of_text`) appended unless it is there or None."""
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_STEPS = 2.0**40
"""Values must be below 2^40, and are summed as a whole number and a multiple of 2^-40: of 2^20 rows, either sum fits 64
bits."""


class Pool:
    """Takes a text's hidden rows chunk by chunk, and pools them into one vector.

    The mean is summed in whole numbers, so that its bits do not depend on how the rows are cut into chunks.

    Args:
        pooling: "mean"; "cls", the first row; "last"; "none", all rows; or "rank", where the rows are outputs of the
            model's head, of which the last one counts.
        task: the task whose adapter the text is embedded with.

    Attributes:
        projection: applied to the pooled vector before it is scaled to length 1 (`Encoder.projected`); None: nothing.

    Raises:
        EngineError: an unknown pooling.
    """

    def __init__(self, pooling: Pooling | Literal["rank"], task: str | None = None) -> None:
        if pooling not in (*POOLINGS, RANK):
            raise EngineError(f"pooling {pooling!r}: must be {' or '.join(POOLINGS)}")
        self.pooling, self.task = pooling, task
        self.projection: Callable[[Tensor], Tensor] | None = None
        self._one: Tensor | None = None
        self._sums: Tensor | None = None
        self._rows: list[Tensor] = []

    def clear(self) -> None:
        """Drop the rows: they will come again from the first."""
        self._one = self._sums = None
        self._rows.clear()

    def add(self, rows: "Tensor") -> None:
        """Adds the next rows [T, n], on any device.

        Raises:
            EngineError: a value is not finite, or is 2^40 or more.
        """
        from torch import stack

        if self.pooling == "cls":
            rows = rows[:1]
        rows = (rows[-1:] if self.pooling == "last" else rows).double()
        if not bool((rows.abs() < _STEPS).all()):
            raise EngineError(
                "the model's hidden values are not finite: its weights are damaged, or overflow"
            )
        if self.pooling in ("cls", "last", RANK):
            if self._one is None or self.pooling in ("last", RANK):
                self._one = rows[0].cpu()
            return
        if self.pooling == "none":
            self._rows.append(rows.cpu())
            return
        whole = rows.round()
        sums = stack((whole, ((rows - whole) * _STEPS).round())).long().sum(1).cpu()
        self._sums = sums if self._sums is None else self._sums + sums

    def embedding(self) -> list[float]:
        """The vector [n] of length 1 (of length 0 if all values are zero); for "none" the rows, flat [T * n]; for
        "rank" the head's outputs, not scaled."""
        from torch import cat
        from torch.nn.functional import normalize

        if self.pooling == "none":
            rows: list[float] = cat(self._rows).flatten().tolist()
            return rows
        pooled = self._one
        if self._sums is not None:
            whole, steps = self._sums.double()
            pooled = whole + steps / _STEPS
        assert pooled is not None, "no rows were pooled"
        if self.pooling == RANK:
            scores: list[float] = pooled.tolist()
            return scores
        pooled = pooled if self.projection is None else self.projection(pooled)
        unit: list[float] = normalize(pooled, dim=0).tolist()
        return unit
