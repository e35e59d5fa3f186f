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
"""What is made of a pair of texts by a model with a trained head: its outputs for the first position, or the last."""


def default_pooling(own: str | None) -> Pooling:
    """How texts are pooled where nobody says: as the model was made for (`ModelConfig.pooling`), or by their mean.

    Raises:
        EngineError: its own is one that there is not.
    """
    found = next((pooling for pooling in POOLINGS if pooling == (own or "mean")), None)
    if found is None:
        raise EngineError(
            f"pooling: this model was made for {own!r}, to score pairs of texts (LLM.rank, POST /v1/rerank); "
            "ask for mean, cls or last"
        )
    return found


def ranks_pairs(config: "ModelConfig") -> bool:
    """Whether the model has a trained head that gives one score, by which pairs of texts are ranked."""
    if (ranker := config.ranker) is not None:
        return ranker.softmax or ranker.classes == 1
    return config.encoder is not None and config.encoder.classes == 1


def pair_ids(tokenizer: "Tokenizer", ranker: "Ranker", query: str, document: str) -> list[int]:
    """The prompt of a pair for a decoder that ranks; its texts hold no control tokens."""
    return tokenizer.encode_hidden(ranker.template, lambda part: ranker.filled(part, query, document))


def tasks_of(config: "ModelConfig") -> "Sequence[Task]":
    """The tasks that the model has adapters for."""
    return () if config.encoder is None else config.encoder.tasks


def task_prefix(tasks: "Sequence[Task]", task: str | None) -> str:
    """What texts begin with that are embedded for a task. Raises EngineError for one that is not among `tasks`."""
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
    """A text's ids with the end token, where the model wants one (`Tokenizer.end_of_text`) and they have it not."""
    return ids if end is None or ids[-1:] == [end] else [*ids, end]


_STEPS = 2.0**40
"""Rows are summed in steps of 2^-40, and hold numbers below 2^40: both sums of 2^20 of them fit 64 bits."""


class Pool:
    """Takes a text's hidden rows chunk by chunk, and pools them: their mean, the first one (`cls`) or the last; `none`
    keeps them all. Of `rank` each row is the outputs of the model's head so far, and the last one counts.  The mean
    is summed in whole numbers, so that it is the same to the last bit however the rows come. `projection`: what the
    model makes of a pooled vector before its length is 1 (`Encoder.projected`). `task`: what the text is embedded
    for, with that task's adapter.

    Raises:
        EngineError: a pooling that there is not.
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
        """The next rows [T, n], on any device.

        Raises:
            EngineError: they are not finite, or as good as that.
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
        """The vector [n], of length 1 (of length 0 if all is zero); without pooling the rows [T * n]; the head's
        outputs of `rank` as they are."""
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
