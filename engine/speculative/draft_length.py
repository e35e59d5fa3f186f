"""Lengths of drafts, which change the time that a completion takes, never its text.

The host adapts them to each sequence's accepted drafts, and divides a step's rows among its sequences. The device uses
the lengths with which steps were measured to give most tokens a second.
"""

from collections.abc import Sequence

from quengine.config import EngineConfig
from quengine.runners.graph_keys import padded_rows

DRAFT_TOKENS = {"cpu": 4, "cuda": 7}
"""Default maximum length of a draft, by kind of device. On a CPU each further row costs a third of the first;
a GPU's matmuls compute tiles of 8 rows.
"""

DRAFT_ROWS = {"cpu": 8, "cuda": 32}
"""Maximum number of rows of a step with drafts. On a CPU, each row beyond costs as much as a step's average row."""

LONGEST_PAUSE = 16
"""Longest pause in steps while all drafts are rejected: one wasted row in this many steps costs little on average."""

FIRST_PLAIN, NEW_PLAIN, LONGEST_PLAIN = 32, 128, 512
"""Plain steps before the device drafts again after drafts that did not pay: the number the first time; the most once a
sequence has a new text (twice that for several); and the most in any case."""

_CHECKED, _LONGEST_CHECK = 2, 512
"""Plain steps that are timed for the comparison with drafts, and the most steps with drafts between them."""

_TRIAL, _FIRST_PLAIN = 4, 4
"""The most steps with drafts of one token after such a pause, and the most plain steps at the very beginning."""

_FIRST_COUNTS = 2
FIRST_RATE, RATE_MEMORY, SHARED_MEMORY = 0.7, 24, 96
"""The accept rate that a first sequence begins with, and the numbers of drafted tokens over which the rates of a
sequence and of all sequences are averaged."""

_TIME_MEMORY, _LINE_MEMORY, _COMPARED = 8, 64, 4
"""Numbers of steps: over which the time of a length is averaged; over which the times of other lengths approach a line,
so that they are tried again; and after a change, when times count for their own length alone."""

_TOKEN_SHARE = 0.08
"""The time of a drafted token as a share of a step without drafts: a layer, a quarter of an output matrix, and a
row."""


AUTOMATIC_MTP = 3
"""Maximum length of drafts by a model's own layer where no option sets it."""

DEVICE_ROWS = 64
"""DRAFT_ROWS of steps that draft on the device, where drafts are as long as they are measured to pay."""

DRAFT_VOCAB = 1 << 16
"""Default number of tokens that a model's own layer drafts from: a quarter of a vocabulary of 248,320. The rows of the
output matrix are most of what the layer's step reads."""


def draft_vocab(config: EngineConfig) -> int:
    """Number of tokens that a model's own layer drafts from; 0: all."""
    return DRAFT_VOCAB if config.draft_vocab is None else config.draft_vocab


def draft_tokens(config: EngineConfig, kind: str) -> int:
    """Maximum length of a draft; `draft_mtp` where only the model's own layer drafts."""
    by_layer = 0 if config.draft_ngram else config.draft_mtp or 0
    return config.draft_tokens or by_layer or DRAFT_TOKENS[kind]


def draft_rows(config: EngineConfig, kind: str) -> int:
    """Maximum number of rows of a step with drafts: one per sequence and one per drafted token; 0: no drafts."""
    if not config.speculates:
        return 0
    own = 1 + draft_tokens(config, kind)
    if config.draft_on_device:
        return max(own, min(DEVICE_ROWS, padded_rows(min(config.parallel, DEVICE_ROWS)) * own))
    return max(DRAFT_ROWS[kind], own)


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
        """Whether the next step should have a draft."""
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
    """The rate at which drafted tokens are accepted, given that those before them in the draft were.

    value: the rate to begin with, that of other sequences, which counts as much as a few tokens. memory: the number of
    drafted tokens over which the rate is averaged.
    """

    def __init__(self, value: float = FIRST_RATE, memory: int = RATE_MEMORY) -> None:
        self.value, self._memory, self._counted = value, memory, _FIRST_COUNTS

    def update(self, drafted: int, accepted: int) -> None:
        """Notes how many tokens of a draft were accepted. Tokens after the first rejected one do not count."""
        for number in range(min(drafted, accepted + 1)):
            self._counted = min(self._counted + 1, self._memory)
            self.value += ((number < accepted) - self.value) / self._counted


class TimedLength:
    """Finds the draft length that gives most tokens a second, up to `most` tokens; 0: plain steps.

    Steps of each length are timed. At first each length has two in a row, since the first may capture a graph. The time
    of an untimed length is estimated from a timed one, with a share of a step for each drafted token. After a change
    between plain steps and drafts, the first steps compare the new length with the others. A later slowdown, as by a
    longer context, is assumed to concern all lengths, and each further drafted token to take as long as the one before.
    The very first steps are plain; later two are plain after 32 steps with drafts, then after 64, and so on up to 512.

    Where drafts do not pay, steps are plain for a pause. Then two have drafts of one token, to notice a change of the
    text, and two more where the rates have risen. Each pause is twice as long as the last, up to LONGEST_PLAIN steps,
    so that these trials take less than a hundredth of the time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seconds: dict[int, float] = {}
        self._pause = self._left = self._trial = 0
        self._before = 0.0  # sum of the rates before a trial
        self._untimed = _FIRST_PLAIN
        self._again: int | None = None  # a length that was timed once
        self._streak, self._check = 0, FIRST_PLAIN
        self._drafted, self._run = False, 0  # whether the last steps had drafts, and how many had, or had not

    @property
    def due(self) -> bool:
        """Whether the next step may have drafts."""
        return not self._left and not self._is_first

    @property
    def pays(self) -> bool:
        """Whether drafts paid when a length was last chosen, or none was yet."""
        return not self._pause

    @property
    def _is_first(self) -> bool:
        return self._untimed > 0 and 0 not in self._seconds

    def skip(self) -> None:
        """Counts a plain step that is not due to have drafts."""
        if self._is_first:
            self._untimed -= 1
        elif self._left:
            self._left -= 1

    def retry(self, sequences: int) -> None:
        """Shortens a pause because `sequences` sequences have new texts."""
        self._left = min(self._left, NEW_PLAIN * min(2, sequences))

    def next(self, rates: Sequence[float], most: int) -> int:
        """Number of tokens to draft in this step, up to `most` for each sequence, given their accept rates."""
        if not self.due:
            self.skip()
            return 0
        lengths = range(min(self._most, most) + 1)
        if self._again is not None and self._again in lengths:
            return self._again
        best = max(lengths, key=lambda length: _tokens(rates, length) / self._time_of(length))
        if best:
            self._pause = self._trial = 0
            self._streak += 1
            if self._streak <= self._check:
                return best
            if self._streak == self._check + _CHECKED:
                self._streak, self._check = 0, min(_LONGEST_CHECK, 2 * self._check)
            return 0
        self._before = sum(rates) if self._trial == _TRIAL else self._before
        if self._trial > _TRIAL - 2 or (self._trial and sum(rates) > self._before):
            self._trial -= 1
            return 1
        self._pause = min(LONGEST_PLAIN, 2 * self._pause or FIRST_PLAIN)
        self._left, self._trial = self._pause - 1, _TRIAL
        return 0

    def note(self, length: int, seconds: float) -> None:
        """Notes the time of a step with drafts of this length. More than twice the usual time counts as twice."""
        if seconds <= 0:
            return
        self._run = self._run + 1 if self._drafted == (length > 0) else 1
        self._drafted = length > 0
        if length not in self._seconds:
            self._seconds[length] = min(seconds, 2 * self._time_of(length)) if self._seconds else seconds
            self._again = length
            return
        if length == self._again:
            self._seconds[length], self._again = min(seconds, self._seconds[length]), None
            return
        change = 1 + (min(seconds / self._seconds[length], 2) - 1) / _TIME_MEMORY
        if self._run <= _COMPARED:
            self._seconds[length] *= change
            return
        self._seconds = {each: known * change for each, known in self._seconds.items()}
        if length and 0 in self._seconds:
            plain = self._seconds[0]
            for each in self._seconds.keys() - {0, length}:
                on_line = plain + (self._seconds[length] - plain) * each / length
                self._seconds[each] += (on_line - self._seconds[each]) / _LINE_MEMORY

    def _time_of(self, length: int) -> float:
        """The time of a step with drafts of this length in seconds, or in plain steps while none was timed."""
        nearest = min(self._seconds, key=lambda known: abs(known - length), default=None)
        if nearest is None:
            return _share(length)
        return self._seconds[nearest] * _share(length) / _share(nearest)


def _share(length: int) -> float:
    return 1 + _TOKEN_SHARE * length


def _tokens(rates: Sequence[float], length: int) -> float:
    """The average number of tokens that a step gives with drafts of this length."""
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
