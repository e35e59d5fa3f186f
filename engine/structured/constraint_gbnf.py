r"""llama.cpp's grammar notation GBNF as a Lark grammar of llguidance's kind.

GBNF (llama.cpp, grammars/README.md) is a grammar over characters. llguidance puts a lexer in front of its parser, and
a lexer takes the longest piece that fits: `("a" | "ab") "bc"` would not match "abc". So every literal is written out
character by character, which leaves the lexer no choice. Masks then cost more than with terminals in Lark, but mean
exactly what the GBNF says.
"""

import re
from dataclasses import dataclass
from typing import NoReturn

from quengine.errors import EngineError

_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)+")
_SPACE_AND_LINES = re.compile(r"(?:\s|#[^\r\n]*)+")
_RULE = re.compile(r"^[ \t]*[a-zA-Z0-9_-]+[ \t\r\n]*::=", re.MULTILINE)
_TOKEN = re.compile(r"<(?:\[[0-9]+\]|[^<>\s\[\]]+)>")
_REPEAT = re.compile(r"\{\s*([0-9]+)\s*(,?)\s*([0-9]*)\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "[": "[", "]": "]", "\\": "\\", "-": "-", "^": "^"}
_CODES = {"x": 2, "u": 4, "U": 8}
_MAX_REPEAT = 100_000
_MAX_DEPTH = 200


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF: it has a rule `name ::= ...`."""
    return _RULE.search(text) is not None


def lark_of_gbnf(text: str) -> str:
    """The same language as a Lark grammar that begins at `start`.

    Raises:
        EngineError: a mistake (with its line), a rule that is missing, or no rule `root`.
    """
    rules, used = _Reader(text).rules()
    for name, line in used.items():
        if name not in rules:
            raise EngineError(f"grammar, line {line}: there is no rule {name!r}")
    if "root" not in rules:
        raise EngineError("grammar: there is no rule 'root', where a GBNF grammar begins")
    # Lark tells rules from terminals by the first letter's case and has words of its own: rules get numbers.
    numbers = {name: f"r{n}" for n, name in enumerate(rules)}
    lines = [f"{numbers[name]}: {body}" for name, body in rules.items()]
    named = re.compile(r"\x00([a-zA-Z0-9_-]+)\x00")
    return "\n".join(
        named.sub(lambda found: numbers[found[1]], line) for line in [f"start: {numbers['root']}", *lines]
    )


@dataclass
class _Reader:
    """Reads rules into Lark expressions in which a rule's name stands between NULs."""

    text: str
    at: int = 0

    def rules(self) -> tuple[dict[str, str], dict[str, int]]:
        """Bodies by name, and the line where each name is first used."""
        self.used: dict[str, int] = {}
        rules: dict[str, str] = {}
        self.skip(_SPACE_AND_LINES)
        while self.at < len(self.text):
            name = self.match(_NAME) or self.fail("a rule's name must begin here")
            self.skip(_SPACE_AND_LINES)
            if not self.take("::="):
                self.fail(f"::= must follow the name {name}")
            if name in rules:
                self.fail(f"rule {name} is defined twice")
            self.skip(_SPACE_AND_LINES)
            rules[name] = self.alternatives(depth=0)
            self.skip(_SPACE_AND_LINES)
        return rules, self.used

    def alternatives(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            self.fail(f"parentheses are nested more than {_MAX_DEPTH} deep")
        options = [self.sequence(depth)]
        while self.take_alternative():
            options.append(self.sequence(depth))
        return " | ".join(options)

    def take_alternative(self) -> bool:
        """`|`, also at the beginning of a new line, where no rule can begin with it."""
        before = self.at
        self.skip(_SPACE_AND_LINES)
        if self.take("|"):
            self.skip(_SPACE_AND_LINES)
            return True
        self.at = before
        return False

    def sequence(self, depth: int) -> str:
        """Items up to `|`, `)` or, outside of parentheses, the end of the line. An empty one matches nothing."""
        items: list[str] = []
        while True:
            self.skip(_SPACE if depth == 0 else _SPACE_AND_LINES)
            item = self.item(depth)
            if item is None:
                return " ".join(items) or '""'
            items.append(item + self.repetition(depth))

    def item(self, depth: int) -> str | None:
        char = self.text[self.at : self.at + 1]
        if char in ("", "|", ")", "\r", "\n"):
            return None
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char == "(":
            self.at += 1
            self.skip(_SPACE_AND_LINES)
            inner = self.alternatives(depth + 1)
            self.skip(_SPACE_AND_LINES)
            if not self.take(")"):
                self.fail("a ) is missing")
            return f"({inner})"
        if char == ".":
            self.at += 1
            return "/(?s:.)/"
        if char == "<":
            return self.match(_TOKEN) or self.fail("a token is written <[id]> or <name>")
        name = self.match(_NAME) or self.fail(f"{char!r} means nothing here")
        self.used.setdefault(name, self.line())
        return f"\x00{name}\x00"

    def repetition(self, depth: int) -> str:
        marks = ""
        while True:
            before = self.at
            self.skip(_SPACE if depth == 0 else _SPACE_AND_LINES)
            char = self.text[self.at : self.at + 1]
            if char and char in "*+?" and not marks:
                self.at += 1
                marks = char
            elif char == "{" and not marks:
                marks = self.count()
            else:
                self.at = before
                return marks

    def count(self) -> str:
        found = _REPEAT.match(self.text, self.at)
        if found is None:
            self.fail("a repetition is written {n}, {n,} or {n,m}")
        least, comma, most = int(found[1]), found[2], found[3]
        if max(least, int(most or 0)) > _MAX_REPEAT:
            self.fail(f"a repetition counts to {_MAX_REPEAT} at most")
        if most and (not comma or int(most) < least):
            self.fail(f"{found[0]} repeats less often than it must")
        self.at = found.end()
        return f"{{{least},{most}}}" if comma else f"{{{least}}}"

    def literal(self) -> str:
        self.at += 1
        characters = []
        while not self.take('"'):
            characters.append(f"/{_regex_char(self.char())}/")
        # In parentheses, so that a repetition takes all of it.
        return f"({' '.join(characters)})" if len(characters) > 1 else "".join(characters) or '""'

    def char_class(self) -> str:
        self.at += 1
        negated = self.take("^")
        parts = []
        while not self.take("]"):
            first = last = self.char()
            if self.text[self.at : self.at + 1] == "-" and self.text[self.at + 1 : self.at + 2] not in (
                "]",
                "",
            ):
                self.at += 1
                last = self.char()
                if last < first:
                    self.fail(f"the range {first!r} to {last!r} is empty")
            parts.append(_regex_char(first) + (f"-{_regex_char(last)}" if last != first else ""))
        if not parts:
            if negated:
                return "/(?s:.)/"
            self.fail("a character class needs at least one character")
        return f"/[{'^' if negated else ''}{''.join(parts)}]/"

    def char(self) -> str:
        """The next character of a literal or class, escapes resolved."""
        char = self.text[self.at : self.at + 1]
        if char in ("", "\n"):
            self.fail("the line ends within quotes or brackets")
        self.at += 1
        if char != "\\":
            return char
        kind = self.text[self.at : self.at + 1]
        if kind in _ESCAPES:
            self.at += 1
            return _ESCAPES[kind]
        digits = self.text[self.at + 1 : self.at + 1 + _CODES.get(kind, 0)]
        if kind not in _CODES or not re.fullmatch(f"[0-9a-fA-F]{{{_CODES[kind]}}}", digits):
            self.fail(f"\\{kind}{digits} is no escape")
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            self.fail(f"\\{kind}{digits} is no character")
        self.at += 1 + len(digits)
        return chr(code)

    def match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def skip(self, pattern: re.Pattern[str]) -> None:
        self.match(pattern)

    def take(self, text: str) -> bool:
        found = self.text.startswith(text, self.at)
        self.at += len(text) if found else 0
        return found

    def line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def fail(self, problem: str) -> NoReturn:
        raise EngineError(f"grammar, line {self.line()}: {problem}")


def _regex_char(char: str) -> str:
    """One character in a regex between slashes, in a class or alone."""
    if char.isalnum() and char.isascii():
        return char
    return f"\\x{{{ord(char):X}}}"
