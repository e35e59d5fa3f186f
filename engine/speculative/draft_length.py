"""Draft lengths: adapted for each sequence to how its drafts went, and divided among the sequences of a step; of steps
that draft on the device, by what they were measured to give a second.

They change the time that a completion takes, never its text.
"""

from collections.abc import Sequence

from quengine.config import EngineConfig

DRAFT_TOKENS = {"cpu": 4, "cuda": 7}
"""Default maximum length of a draft, by kind of device. On a CPU each further row costs a third of the first;
a GPU's matmuls compute tiles of 8 rows.
"""

DRAFT_ROWS = {"cpu": 8, "cuda": 32}
"""Maximum number of rows of a step with drafts. On a CPU, each row beyond costs as much as a step's average row."""

LONGEST_PAUSE = 16
"""Longest pause in steps while all drafts are rejected: one wasted row in this many steps costs little on average."""


DRAFT_VOCAB = 1 << 16
"""Default number of tokens that a model's own layer drafts from. The rows of the output matrix are most of what its
step reads: of 248,320 a quarter."""


def draft_vocab(config: EngineConfig) -> int:
    """Number of tokens that a model's own layer drafts from; 0: all."""
    return DRAFT_VOCAB if config.draft_vocab is None else config.draft_vocab


def draft_tokens(config: EngineConfig, kind: str) -> int:
    """Maximum length of a draft. By a layer of the model alone, it is the one that the options say."""
    by_layer = 0 if config.draft_ngram else config.draft_mtp
    return config.draft_tokens or by_layer or DRAFT_TOKENS[kind]


def draft_rows(config: EngineConfig, kind: str) -> int:
    """Maximum number of rows of a step with drafts: one per sequence and one per drafted token; 0: no drafts."""
    return max(DRAFT_ROWS[kind], 1 + draft_tokens(config, kind)) if config.speculates else 0


class DraftLength:
    """The draft length of one sequence: `most` at first, adapted after each draft.

    It is doubled after a draft accepted in full, and otherwise cut to one more than was accepted. After a draft of
    which no token was accepted, drafting pauses, twice as long each time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._length = most
        self._pause = 0  # length of the last pause, in steps
        self._left = 0

    @property
    def due(self) -> bool:
        """Whether the next step is to have a draft."""
        return not self._left

    def next(self) -> int:
        """Number of tokens to draft in this step."""
        if self._left:
            self._left -= 1
            return 0
        return self._length

    def update(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft, of at least one token, were accepted."""
        if accepted == drafted:
            self._length = min(self._most, max(self._length, 2 * drafted))
        else:
            self._length = max(1, min(self._most, accepted + 1))
        if accepted:
            self._pause = 0
        else:
            self._pause = self._left = min(LONGEST_PAUSE, 2 * self._pause or 1)


class AcceptRate:
    """How likely a drafted token of a sequence is accepted where those before it were."""

    def __init__(self) -> None:
        self.value = _FIRST_RATE

    def update(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted; those after the first that was not say nothing."""
        for number in range(min(drafted, accepted + 1)):
            self.value += ((number < accepted) - self.value) / _RATE_MEMORY


class TimedLength:
    """The length of drafts of a step that give most tokens a second, of up to `most` tokens.

    Steps of each length are timed; one that was not is taken to differ from those that were by a share of a step for
    each drafted token. Where drafts do not pay, there is one of a single token after each pause, and pauses are twice
    as long each time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._pause = self._left = 0

    @property
    def due(self) -> bool:
        """Whether the next step is to have drafts."""
        return not self._left

    def next(self, rates: Sequence[float], most: int) -> int:
        """Number of tokens to draft in this step, up to `most` for each sequence, given their accept rates."""
        if self._left:
            self._left -= 1
            return 0
        lengths = range(min(self._most, most) + 1)
        best = max(lengths, key=lambda length: _tokens(rates, length) / self._time_of(length))
        if best:
            self._pause = 0
            return best
        self._pause = self._left = min(LONGEST_PAUSE, 2 * self._pause or 1)
        return 1

    def note(self, length: int, seconds: float) -> None:
        """Notes what a step with drafts of this length took; longer ones than usual have other reasons."""
        if seconds > 0:
            before = self._seconds.get(length, seconds)
            self._seconds[length] = before + (min(seconds, 2 * before) - before) / _TIME_MEMORY

    def _time_of(self, length: int) -> float:
        """Seconds, or shares of a step while none was timed."""
        nearest = min(self._seconds, key=lambda known: abs(known - length), default=None)
        if nearest is None:
            return _share(length)
        return self._seconds[nearest] * _share(length) / _share(nearest)


_FIRST_RATE = 0.7
_RATE_MEMORY, _TIME_MEMORY = 12, 8
"""Drafted tokens, and steps, over which a rate and a time are averaged."""

_TOKEN_SHARE = 0.08
"""Of a step without drafts, what a drafted token takes: a layer and a quarter of an output matrix, and its row."""


def _share(length: int) -> float:
    return 1 + _TOKEN_SHARE * length


def _tokens(rates: Sequence[float], length: int) -> float:
    """Tokens that a step gives on average, with drafts of this length."""
    return sum(rate**drafted for rate in rates for drafted in range(length + 1))


def divide(room: int, proposed: Sequence[int]) -> list[int]:
    """Divides `room` tokens among sequences, given how many each proposed: first tokens before second ones."""
    granted = [0] * len(proposed)
    for length in range(max(proposed, default=0)):
        for index, count in enumerate(proposed):
            if count > length and room > 0:
                granted[index] += 1
                room -= 1
    return granted
