"""Patterns of module names against Python's `re`, and that hostile ones end."""

import random
import re

import pytest

from quengine.models.lora.module_pattern import MOST_STATES, ModulePattern, PatternError
from tests.each_case import each_case

NAMES = [
    "model.layers.1.mlp.up_proj",
    "model.layers.12.self_attn.q_proj",
    "q_proj",
    "a",
    "",
    "a.b.",
    "..",
    "ab.aab",
]
PATTERNS = [
    "q_proj", "q.proj", "layers.1.mlp.up_proj", "b", ".", "..", "a.b", "model.layers.1.mlp.up_projx",
    r"layers\.1\.mlp\.(up|down)_proj", r"model.layers.\d+.self_attn.(q|k)_proj", r"^model\..*_proj$",
    r"layers\.([0-9]|1[0-2])\.(?:mlp|self_attn)\..+", r"layers\.\d{1,2}\.mlp\.\w+?", "", "(a|aa)*b?", "[^.]+", "a{2}b",
    "a{0,1}b", r"[\w]{3,}", r"[\w.-]+", r"[\d\-]*", "a{,2}b", ".*", "^a", "[]a-]", r"(a*)*\.", r"\S+[.]\S{2}",
]  # fmt: skip


@each_case("pattern", PATTERNS)
def test_matches_are_those_of_re(pattern: str) -> None:
    for name in NAMES:
        wanted = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert ModulePattern(pattern).matches(name) == wanted, (pattern, name)


def test_random_patterns() -> None:
    draw = random.Random(1)

    def drawn(depth: int) -> str:
        kinds = ["a", "b", r"\.", ".", "[ab]", r"\d"] + (["group", "choice", "repeat"] if depth else [])
        kind = draw.choice(kinds)
        if kind == "group":
            return drawn(depth - 1) + drawn(depth - 1)
        if kind == "choice":
            return f"({drawn(depth - 1)}|{drawn(depth - 1)})"
        if kind == "repeat":
            return f"({drawn(depth - 1)}){draw.choice(['*', '+', '?', '{1,2}', '{2}'])}"
        return kind

    for _ in range(300):
        pattern = drawn(3)
        compiled, ours = re.compile(rf"(.*\.)?({pattern})$"), ModulePattern(pattern)
        for _ in range(10):
            name = "".join(draw.choices("ab.1", k=draw.randrange(7)))
            assert ours.matches(name) == (compiled.match(name) is not None), (pattern, name)


@each_case("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)*.*.*.*.*b", "((a*)*)*b", "(a{0,30}){0,30}b"])
def test_patterns_that_take_re_exponential_time(pattern: str) -> None:
    assert not ModulePattern(pattern).matches("a" * 400)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", r"missing \)"),
        (")", r"unbalanced \)"),
        ("[a", "unterminated character set"),
        ("*a", "nothing to repeat"),
        ("a**", "multiple repeat"),
        (r"(a)\1", r"\\1 is not implemented"),
        ("(?=a)b", r"\(\?= is not implemented"),
        ("(?i)a", r"\(\?i is not implemented"),
        (r"\bq", r"\\b is not implemented"),
        ("a\\", r"\\ is not implemented"),
        ("a{2,1}", "min repeat greater than max repeat"),
        ("a{x}", "{ must have a number"),
        ("[b-a]", "bad character range b-a"),
        (r"[\.-_]", "from an escaped character is not implemented"),
        ("a{}", "{ must have a number"),
        ("((((a{9}){9}){9}){9}){9}", f"takes more than {MOST_STATES} states"),
        ("(" * 40 + "a" + ")" * 40, "has groups in more than 32 groups"),
    ],
)
def test_what_is_no_pattern(pattern: str, problem: str) -> None:
    with pytest.raises(PatternError, match=problem):
        ModulePattern(pattern)
