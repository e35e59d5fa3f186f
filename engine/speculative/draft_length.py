"""How many tokens are worth drafting: for one sequence, by how its drafts went, and for all sequences of a step.

This changes the time that a completion takes, never its text.
"""

from collections.abc import Sequence

from quengine.config import EngineConfig

DRAFT_TOKENS = {"cpu": 4, "cuda": 7}
"""Tokens of a draft at most, by kind of device, where nothing else is said. On a CPU a further row costs a third of
the first; a GPU's matmuls take 8 rows at a time."""

DRAFT_ROWS = {"cpu": 8, "cuda": 32}
"""Rows of a step up to which drafts are added to it. More of them cost a CPU as much each as a step's average row."""

LONGEST_PAUSE = 16
"""Steps without a draft, at most, while none is right: after so many a row more costs little on average."""


def draft_tokens(config: EngineConfig, kind: str) -> int:
    """Tokens of a draft at most."""
    return config.draft_tokens or DRAFT_TOKENS[kind]


def draft_rows(config: EngineConfig, kind: str) -> int:
    """Rows of a step up to which there are drafts, a row a sequence and one a drafted token; 0: there are none."""
    return max(DRAFT_ROWS[kind], 1 + draft_tokens(config, kind)) if config.speculates else 0


class DraftLength:
    """The length of one sequence's drafts: `most` at first, longer after one that was right to its end, else shorter.

    After drafts of which nothing was right there is a pause, each time twice as long.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._pause = 0  # the last one
        self._left = 0

    def next(self) -> int:
        """Tokens to draft in this step."""
        if self._left:
            self._left -= 1
            return 0
        return self._length

    def update(self, drafted: int, accepted: int) -> None:
        """Note how a draft of one token or more went."""
        if accepted == drafted:
            self._length = min(self._most, max(self._length, 2 * drafted))
        else:
            self._length = max(1, min(self._most, accepted + 1))
        if accepted:
            self._pause = 0
        else:
            self._pause = self._left = min(LONGEST_PAUSE, 2 * self._pause or 1)


def divide(room: int, proposed: Sequence[int]) -> list[int]:
    """Of `room` tokens in all what each sequence gets of those it proposed: first tokens for all come before second
    ones."""
    granted = [0] * len(proposed)
    for length in range(max(proposed, default=0)):
        for index, count in enumerate(proposed):
            if count > length and room > 0:
                granted[index] += 1
                room -= 1
    return granted
