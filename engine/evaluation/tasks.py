"""Multiple choice: the share of tasks in which the right ending has the highest mean log-probability of its tokens.

The files, their order and the score are those of llama-perplexity: `--hellaswag` (six lines a task: context, number of
the right ending, four endings), `--winogrande` (CSV: number, sentence with a gap `_`, two fillings, 1 or 2) and
`--multiple-choice` (binary: ARC, MMLU, TruthfulQA as its users have them).
"""

import math
import struct
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from quengine.errors import EngineError
from quengine.platform.input_files import decoded
from quengine.scoring.prompt_logits import TargetLogprobs, compute

if TYPE_CHECKING:
    from quengine.llm import LLM

TaskKind = Literal["hellaswag", "winogrande", "multiple-choice"]

HELLASWAG_TASKS = 400
"""Tasks of a HellaSwag file that are computed where no number is given, as there."""

_TRAILING = 3
"""Fewest tokens from the fillings on where a WinoGrande score leaves the fillings themselves out."""

_MOST_ANSWERS = 100
_INTERVAL = 1.95996398454
"""Standard deviations of a normal distribution on either side that hold 95% of it."""


@dataclass(frozen=True)
class Candidate:
    """A text, scored from character `start` on; -1: from where the choices differ."""

    text: str
    start: int = -1


@dataclass(frozen=True)
class ChoiceTask:
    """Choices and the numbers of the right ones. `place`: its number in the file, from 1, for errors."""

    choices: list[Candidate]
    right: frozenset[int]
    place: int


@dataclass(frozen=True)
class Accuracy:
    """Tasks answered so far.

    Attributes:
        correct, done: tasks answered right, and tasks answered. total: tasks to answer.
        choices: total number of choices of the answered tasks.
        scores: the mean log-probability of each choice of the last task.
    """

    kind: TaskKind
    correct: int
    done: int
    total: int
    choices: int
    computed_tokens: int
    seconds: float
    scores: tuple[float, ...]

    @property
    def accuracy(self) -> float:
        """The share of right answers, 0 to 1."""
        return self.correct / self.done

    @property
    def error(self) -> float:
        """The standard error of `accuracy`; 0 for fewer than two tasks."""
        share = self.accuracy
        return math.sqrt(share * (1 - share) / (self.done - 1)) if self.done > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval of 95%. Source: E. B. Wilson, Probable inference, 1927."""
        share, count = self.accuracy, self.done
        z = _INTERVAL**2 / count
        half = z * math.sqrt(count * (4 * share * (1 - share) + z)) / (2 * _INTERVAL)
        return (share + z / 2 - half) / (1 + z), (share + z / 2 + half) / (1 + z)

    @property
    def chance(self) -> float:
        """The share that guessing gets right."""
        return self.done / self.choices

    @property
    def tokens_per_second(self) -> float:
        """Computed tokens per second."""
        return self.computed_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float:
        """Time that the remaining tasks take at this speed."""
        return self.seconds * (self.total - self.done) / self.done


def read_tasks(kind: TaskKind, data: bytes, count: int | None = None) -> list[ChoiceTask]:
    """The tasks of a file; with `count`, those that llama-perplexity draws from it, in its order.

    count: the largest number of tasks; None: 400 for HellaSwag, else all.

    Raises:
        EngineError: the file is not of this format; the message names the task or the line.
    """
    read = {"hellaswag": _hellaswag, "winogrande": _winogrande, "multiple-choice": _multiple_choice}[kind]
    tasks = read(data)
    if not tasks:
        raise EngineError(f"--{kind}: the file has no tasks")
    if kind == "hellaswag":
        count = min(HELLASWAG_TASKS if count is None else count, len(tasks))
        return _without_repeats(tasks, count, _uniform)
    if count is None or count >= len(tasks):
        return tasks
    return _without_repeats(tasks, count, _scaled)


def answer(llm: "LLM", kind: TaskKind, tasks: Seq[ChoiceTask]) -> Iterator[Accuracy]:
    """The accuracy after each of the tasks.

    Raises:
        EngineError: a task does not fit the context, has no choices that differ, or logits are not finite.
    """
    began, correct, choices, computed = time.perf_counter(), 0, 0, 0
    scored = [_scored(llm, kind, task) for task in tasks]
    finished = compute(llm, (part.prompt for parts in scored for part in parts))
    for number, (task, parts) in enumerate(zip(tasks, scored, strict=True), 1):
        means = list[float]()
        for part in parts:
            next(finished)
            values = part.values()
            means.append(math.fsum(values) / len(values))
            computed += len(part.prompt.prompt)
        best = means.index(max(means))
        correct += best in task.right
        choices += len(parts)
        seconds = time.perf_counter() - began
        yield Accuracy(kind, correct, number, len(tasks), choices, computed, seconds, tuple(means))


def _scored(llm: "LLM", kind: TaskKind, task: ChoiceTask) -> list[TargetLogprobs]:
    """The log-probabilities to compute for a task, one object for each choice. Raises EngineError as `answer` does."""
    ids = [llm.encode(choice.text) for choice in task.choices]
    where = f"--{kind}: task {task.place}"
    longest = max(map(len, ids))
    if longest > llm.ctx_size:
        raise EngineError(f"{where} has {longest} tokens, the context {llm.ctx_size}: raise -c")
    same = _common(ids)
    if not 0 < same < min(map(len, ids)):
        raise EngineError(f"{where} has no choices that differ after a common beginning")
    if kind != "winogrande":
        return [TargetLogprobs(each, same) for each in ids]
    skips = all(len(each) - same > _TRAILING for each in ids)
    parts = []
    for each, choice in zip(ids, task.choices, strict=True):
        first = len(llm.encode(choice.text[: choice.start])) if skips else same
        last = len(each) - (len(each) - first > 1)
        parts.append(TargetLogprobs(each, first, last))
    return parts


def _common(ids: Seq[Seq[int]]) -> int:
    """The length of the common beginning of all `ids`."""
    for place, tokens in enumerate(zip(*ids, strict=False)):
        if len(set(tokens)) > 1:
            return place
    return min(map(len, ids))


def _hellaswag(data: bytes) -> list[ChoiceTask]:
    lines = decoded(data, "--hellaswag").removesuffix("\n").split("\n") if data else []
    if len(lines) % 6:
        raise EngineError(f"--hellaswag: {len(lines)} lines, and a task has 6")
    tasks = []
    for place in range(0, len(lines), 6):
        context, label, *endings = lines[place : place + 6]
        if label.strip() not in ("0", "1", "2", "3"):
            raise EngineError(f"--hellaswag: line {place + 2}: {label[:40]!r}: must be 0, 1, 2 or 3")
        choices = [Candidate(f"{context} {ending}") for ending in endings]
        tasks.append(ChoiceTask(choices, frozenset([int(label)]), place // 6 + 1))
    return tasks


def _winogrande(data: bytes) -> list[ChoiceTask]:
    return [
        _winogrande_task(line, place)
        for place, line in enumerate(decoded(data, "--winogrande").split("\n"), 1)
        if line
    ]


def _winogrande_task(line: str, place: int) -> ChoiceTask:
    """The task of a line. Commas within quotes are no separators, and a sentence loses the quotes around it."""
    commas, quoted = list[int](), False
    for at, letter in enumerate(line):
        if letter == '"':
            quoted = not quoted
        elif letter == "," and not quoted and len(commas) < 4:
            commas.append(at)
    where = f"--winogrande: line {place}"
    if len(commas) < 4:
        raise EngineError(f"{where}: must be number,sentence,filling,filling,answer")
    a, b, c, d = commas
    sentence, first, second, answer = line[a + 1 : b], line[b + 1 : c], line[c + 1 : d], line[d + 1 :]
    if sentence[:1] == '"':
        sentence = sentence[1:-1]
    before, gap, after = sentence.partition("_")
    if not gap:
        raise EngineError(f"{where}: the sentence has no gap _")
    if answer.strip() not in ("1", "2"):
        raise EngineError(f"{where}: answer {answer[:40]!r}: must be 1 or 2")
    choices = [Candidate(before + filling + after, len(before + filling)) for filling in (first, second)]
    return ChoiceTask(choices, frozenset([int(answer) - 1]), place)


class _Reader:
    """A bounded reader of a multiple-choice file."""

    def __init__(self, data: bytes) -> None:
        self._data, self.at, self.place = data, 0, 0

    def take(self, count: int) -> bytes:
        part = self._data[self.at : self.at + count]
        if len(part) < count:
            where = f"task {self.place}" if self.place else "the header"
            raise EngineError(f"--multiple-choice: cut short in {where}, at byte {self.at}; not such a file?")
        self.at += count
        return part

    def integers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.take(4 * count))

    def text(self) -> str:
        (size,) = self.integers(1)
        return self.take(size).decode("utf-8", "replace")

    def answers(self) -> tuple[list[str], tuple[int, ...]]:
        (count,) = self.integers(1)
        if count > _MOST_ANSWERS:
            raise EngineError(
                f"--multiple-choice: task {self.place} has {count} answers: at most {_MOST_ANSWERS}"
            )
        return [self.text() for _ in range(count)], self.integers(count)


def _multiple_choice(data: bytes) -> list[ChoiceTask]:
    reader, tasks = _Reader(data), list[ChoiceTask]()
    (count,) = reader.integers(1)
    reader.take(4 * count)  # the offsets of the tasks, which follow one another
    for place in range(1, count + 1):
        reader.place = place
        question = reader.text()
        answers, labels = reader.answers()
        reader.answers()  # the second set of answers, several of which are right
        if not question or not all(answers) or len(answers) < 2:
            raise EngineError(f"--multiple-choice: task {place} has an empty question or answer")
        right = frozenset(number for number, label in enumerate(labels) if label == 1)
        tasks.append(ChoiceTask([Candidate(f"{question} {each}") for each in answers], right, place))
    return tasks


def _without_repeats(
    tasks: list[ChoiceTask], count: int, draw: "Callable[[np.random.MT19937, int], int]"
) -> list[ChoiceTask]:
    """`count` tasks, as llama-perplexity's generator with seed 1 draws them."""
    random = np.random.MT19937()
    random._legacy_seeding(1)  # type: ignore[attr-defined]  # as C++'s std::mt19937 is seeded
    left, drawn = list(tasks), list[ChoiceTask]()
    for _ in range(count):
        at = draw(random, len(left))
        drawn.append(left[at])
        if draw is _uniform:
            del left[at]
        else:
            left[at] = left[-1]
            left.pop()
    return drawn


def _uniform(random: "np.random.MT19937", count: int) -> int:
    """0 .. count - 1, as libstdc++'s uniform_int_distribution draws it: D. Lemire, Fast Random Integer Generation in an
    Interval, 2019."""
    product = int(random.random_raw()) * count
    if product % 2**32 < count:
        while product % 2**32 < (2**32 - count) % count:
            product = int(random.random_raw()) * count
    return product >> 32


def _scaled(random: "np.random.MT19937", count: int) -> int:
    """0 .. count - 1, by fp32 products."""
    scale = np.float32(1) / (np.float32(1) + np.float32(2**32 - 1))
    return int(scale * np.float32(int(random.random_raw())) * np.float32(count))
