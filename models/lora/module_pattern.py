"""Regular expressions of module names in a PEFT adapter's configuration, matched in linear time.

They come from a file, and Python's `re` may take time that is exponential in a name's length. So a pattern becomes a
set of states, and a name moves all of them at once: that takes at most (number of states * the name's length) steps.
Source: Thompson 1968, "Regular Expression Search Algorithm".
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

MOST_STATES = 4096
_MOST_DEPTH = 32
_Test: TypeAlias = Callable[[str], bool]
_SETS: dict[str, _Test] = {
    "d": str.isdecimal,
    "w": lambda char: char.isalnum() or char == "_",
    "s": str.isspace,
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not (char.isalnum() or char == "_"),
    "S": lambda char: not char.isspace(),
}


class PatternError(ValueError):
    """A pattern that is no regular expression, or has a form that is not implemented."""


class _State(NamedTuple):
    """A state with its next states `to`. With `test`, a character for which it is true leads on. Without, the state
    leads on without a character: always, or only `at` the "start" or "end" of the name."""

    to: tuple[int, ...]
    test: _Test | None = None
    at: str = ""


class _Char(NamedTuple):
    test: _Test


class _Anchor(NamedTuple):
    at: str


class _Repeat(NamedTuple):
    """`node` at least `least` times, and at most `most`; None: any number."""

    node: "_Node"
    least: int
    most: int | None


class _Choice(NamedTuple):
    """One of sequences of nodes."""

    of: "list[list[_Node]]"


_Node: TypeAlias = _Char | _Anchor | _Repeat | _Choice


class ModulePattern:
    """A pattern that must match a module's whole name, or its end after a dot, as in
    `re.match(rf"(.*\\.)?({text})$", name)`. Raises PatternError."""

    def __init__(self, text: str) -> None:
        self._plain = text if all(char.isalnum() or char in "_." for char in text) else None
        self._states = [_State(())]  # the end
        self._start = self._add(_Parser(text).whole(), 0)

    def matches(self, name: str) -> bool:
        if self._plain is not None:  # one string for each module, often: compared with its end
            end = name[-len(self._plain) :] if self._plain else ""
            before = name[: len(name) - len(self._plain)]
            alike = all(a == b or (a == "." and b != "\n") for a, b in zip(self._plain, end, strict=False))
            return alike and len(end) == len(self._plain) and (not before or before.endswith("."))
        held: set[int] = set()
        for position, char in enumerate(name):
            if position == 0 or name[position - 1] == ".":
                self._reach(self._start, position, name, held)
            found: set[int] = set()
            for number in held:
                state = self._states[number]
                if state.test is not None and state.test(char):
                    for to in state.to:
                        self._reach(to, position + 1, name, found)
            held = found
        if not name or name.endswith("."):
            self._reach(self._start, len(name), name, held)
        return 0 in held

    def _reach(self, number: int, position: int, name: str, held: set[int]) -> None:
        """Adds a state, and those that it leads to without a character."""
        waiting = [number]
        while waiting:
            number = waiting.pop()
            state = self._states[number]
            if number in held or (state.at and position != (0 if state.at == "start" else len(name))):
                continue
            held.add(number)
            if state.test is None:
                waiting += state.to

    def _add(self, node: _Node, to: int) -> int:
        """The first state of a node after which state `to` follows."""
        match node:
            case _Char(test):
                return self._state(_State((to,), test))
            case _Anchor(at):
                return self._state(_State((to,), at=at))
            case _Choice(of):
                return self._state(_State(tuple(self._add_all(each, to) for each in of)))
            case _Repeat(inner, least, most):
                if most is None:
                    again = self._state(_State(()))
                    self._states[again] = _State((self._add(inner, again), to))
                    to = again
                for _ in range(0 if most is None else most - least):
                    to = self._state(_State((self._add(inner, to), to)))
                for _ in range(least):
                    to = self._add(inner, to)
                return to

    def _add_all(self, nodes: Sequence[_Node], to: int) -> int:
        for node in reversed(nodes):
            to = self._add(node, to)
        return to

    def _state(self, state: _State) -> int:
        if len(self._states) >= MOST_STATES:
            raise PatternError(f"takes more than {MOST_STATES} states")
        self._states.append(state)
        return len(self._states) - 1


class _Parser:
    """Reads a pattern: characters, sets, groups, choices, repetitions, and both ends of the name."""

    def __init__(self, text: str) -> None:
        self.text, self.at, self.depth = text, 0, 0

    def whole(self) -> _Choice:
        found = self._choice()
        if self.at < len(self.text):
            raise PatternError("unbalanced )")
        return found

    def _choice(self) -> _Choice:
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise PatternError(f"has groups in more than {_MOST_DEPTH} groups")
        of = [list[_Node]()]
        while (char := self._next()) not in ("", ")"):
            self.at += 1
            if char == "|":
                of.append([])
            else:
                of[-1].append(self._repeated(self._atom(char)))
        self.depth -= 1
        return _Choice(of)

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _atom(self, char: str) -> _Node:
        match char:
            case "(":
                return self._group()
            case "[":
                return _Char(self._set())
            case ".":
                return _Char(lambda char: char != "\n")
            case "^" | "$":
                return _Anchor("start" if char == "^" else "end")
            case "\\":
                return _Char(self._escaped())
            case "*" | "+" | "?":
                raise PatternError("nothing to repeat")
        return _Char(char.__eq__)

    def _group(self) -> _Node:
        if self._next() == "?":
            if self.text[self.at : self.at + 2] != "?:":
                raise PatternError(f"({self.text[self.at : self.at + 2]} is not implemented")
            self.at += 2
        found = self._choice()
        if self._next() != ")":
            raise PatternError("missing )")
        self.at += 1
        return found

    def _escaped(self) -> _Test:
        char = self._next()
        self.at += 1
        if char in _SETS and char:
            return _SETS[char]
        if not char or char.isalnum():
            raise PatternError(f"\\{char} is not implemented")
        return char.__eq__

    def _set(self) -> _Test:
        no = self._next() == "^"
        self.at += no
        tests, first = list[_Test](), True
        while (char := self._next()) != "]" or first:
            if not char:
                raise PatternError("unterminated character set")
            self.at += 1
            first = False
            tests.append(self._class() if char == "\\" else self._range(char))
        self.at += 1
        return lambda char: any(test(char) for test in tests) != no

    def _class(self) -> _Test:
        found = self._escaped()
        if self._next() == "-" and self.text[self.at + 1 : self.at + 2] not in ("", "]"):
            raise PatternError("a character range from an escaped character is not implemented")
        return found

    def _range(self, low: str) -> _Test:
        high = self.text[self.at + 1 : self.at + 2]
        if self._next() != "-" or high in ("", "]"):
            return low.__eq__
        if high == "\\" or high < low:
            raise PatternError(f"bad character range {low}-{high}")
        self.at += 2
        return lambda char: low <= char <= high

    def _repeated(self, node: _Node) -> _Node:
        counts: tuple[int, int | None] | None = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(
            self._next()
        )
        if counts is not None:
            self.at += 1
        elif self._next() == "{":
            counts = self._counts()
        if counts is None:
            return node
        if self._next() == "?":  # the shortest match: of the whole name there is one
            self.at += 1
        if self._next() in ("*", "+", "?") and self._next():
            raise PatternError("multiple repeat")
        return _Repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None]:
        end = self.text.find("}", self.at)
        text = self.text[self.at + 1 : max(end, 0)]
        low, comma, high = text.partition(",")
        numbers = [low or "0", *([high] if high else [])]
        good = all(each.isascii() and each.isdecimal() and len(each) < 5 for each in numbers)
        if text in ("", ",") or end < 0 or not good:
            raise PatternError("{ must have a number, or two, and }")
        self.at += len(text) + 2
        least = int(numbers[0])
        most = least if not comma else int(high) if high else None
        if most is not None and most < least:
            raise PatternError("min repeat greater than max repeat")
        return least, most
