"""Log-probabilities of texts that may follow a prompt: which of some choices is the likeliest."""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

from quengine.errors import EngineError
from quengine.request.prompt import as_ids
from quengine.scoring.prompt_logits import PromptEngine, ScoredTokens, TargetLogprobs, compute

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ChoiceScore:
    """A text after a prompt.

    Attributes:
        text: the choice.
        tokens: its token ids.
        logprobs: the natural logarithm of each token's probability after all tokens before it.
        greedy: whether each token is the likeliest in its place, so that temperature 0 would generate this text.
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    greedy: bool

    @property
    def logprob(self) -> float:
        """The log-probability of the whole text: the sum."""
        return math.fsum(self.logprobs)

    @property
    def mean_logprob(self) -> float:
        """The mean over the tokens, which compares choices of different lengths."""
        return self.logprob / len(self.logprobs)


class _Scored(TargetLogprobs):
    """`TargetLogprobs` that also notes whether each target is the likeliest token."""

    def __init__(self, scored: ScoredTokens) -> None:
        super().__init__(*scored)
        self._greedy = list["Tensor"]()

    def _take(self, logits: "Tensor", position: int) -> None:
        import torch

        targets = self._targets[position + 1 : position + 1 + len(logits)]
        self._greedy.append((logits.argmax(-1) == torch.tensor(targets, device=logits.device)).all())
        super()._take(logits, position)

    @property
    def greedy(self) -> bool:
        return all(map(bool, self._greedy))


def score_continuations(
    llm: PromptEngine, continuations: Iterable[ScoredTokens]
) -> Iterator[tuple[list[float], bool]]:
    """For each continuation, in order, the log-probabilities of its scored tokens, and whether all are the likeliest.

    Raises:
        EngineError: one does not fit the context, or a log-probability is not finite.
    """
    scored = [_Scored(each) for each in continuations]
    finished = compute(llm, (each.prompt for each in scored))
    for each in scored:
        next(finished)
        yield each.values(), each.greedy


def score_choices(llm: PromptEngine, prompt: str | Seq[int], choices: Seq[str]) -> list[ChoiceScore]:
    """The score of each choice after the prompt; all are scored from the same token on.

    That token is the first at which the prompt with some choice differs from the prompt alone: one token may span the
    place where prompt and choice meet.

    Raises:
        EngineError: a choice is empty; the prompt and a choice together exceed the context; or no token precedes the
            choices.
    """
    if isinstance(prompt, str):
        before, wholes = llm.encode(prompt), [llm.encode(prompt + choice) for choice in choices]
    else:
        before = as_ids(prompt)
        wholes = [before + llm.tokenizer.encode(choice) for choice in choices]
    first = min((_shared(before, whole) for whole in wholes), default=0)
    if choices and not first:
        why = "has no token that stays the same with every choice" if before else "is empty"
        raise EngineError(f"the prompt {why}: the first token of a text has no log-probability")
    for choice, whole in zip(choices, wholes, strict=True):
        if len(whole) == first:
            raise EngineError(f"the choice {choice!r} adds no token to the prompt")
    found = score_continuations(llm, [ScoredTokens(whole, first) for whole in wholes])
    return [
        ChoiceScore(choice, whole[first:], logprobs, greedy)
        for choice, whole, (logprobs, greedy) in zip(choices, wholes, found, strict=True)
    ]


def _shared(ids: Seq[int], others: Seq[int]) -> int:
    """How many first tokens are the same in both."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, others, strict=False)))
