"""The field's words: terms that this project once used in a sense of its own do not come back.

WORDS says what to write instead. Code, docstrings, comments, help, errors, tests and docs all count.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("engine", "kernels", "models", "cli", "tests", "benchmarks", "docs", "examples")
EXCEPT = ("CHANGELOG.md", "parity_texts.py")
"""What was, in the words of its time, and texts that are data."""

WORDS = {
    r"rehears\w*": "warm up, warm-up",
    r"newcomers?|_?seats?|seated|_?boards?": "slot, static inputs",
    r"nobody's": "padding, unused",
    r"spare_?(?:block|row)s?|spare (?:block|row)s?": "padding block, padding rows",
    r"record(?:ed|ing) (?:step|graph|prompt)s?|recorded_at|(?:step|graph|prompt)s? (?:is|are) recorded": "captured",
    r"tickets?": "arrival counters",
    r"stretch(?:es)?": "KV split",
    r"shrinks?": "rescale",
    r"half_rows?|half rows?|HalfRows": "fp16 operand",
    r"unscaled?|unscal(?:es|ing)": "row scale",
    r"word[_ ]?tiles?|WordTiles?": "VNNI",
    r"matrix[_ ]?tiles?|MatrixTiles?|quads": "AMX tiles, int8 VNNI",
    r"let(?:s|ting)? go of": "release",
    r"forgets?|forgotten": "reset, release",
    r"wish(?:es)?": "proposal",
    r"draft_?pace|\bpace\b": "draft length",
    r"laid prompts?|LaidPrompts|pad_rectangles?": "prefill metadata, pad_block_tables",
    r"RowPicker|rows that go on|goes on alone": "gather of last tokens",
    r"fixed_kernels": "batch_invariant",
    r"[Kk]nows (?:nothing|no|only|not)|[Dd]oes not know": "(leave the line out: the imports say it)",
    r"EXPANDED_TYPES|expands? (?:its |the |their )?weights|weights? (?:is|are) expanded|expanded at load": "dequantize",
}
PATTERN = re.compile(
    rf"(?<![A-Za-z])(?:{'|'.join(f'(?P<w{i}>{word})' for i, word in enumerate(WORDS))})(?![A-Za-z])"
)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, what stands there, what to write instead."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in PATTERN.finditer(line):
            assert match.lastgroup is not None
            yield number, match.group(), list(WORDS.values())[int(match.lastgroup[1:])]


def sources() -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".html") and path.name not in (*EXCEPT, Path(__file__).name):
                yield path
    yield ROOT / "README.md"
    yield ROOT / "CONTRIBUTING.md"


def test_the_fields_words_are_used() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {word!r}: write {instead}"
        for path in sources()
        for number, word, instead in findings(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line", ["def rehearse(rows):", "# Knows nothing of rows.", "x = HalfRows(y)", "a spare block"]
)
def test_a_private_word_is_found(line: str) -> None:
    assert len(list(findings(line))) == 1


@pytest.mark.parametrize("line", ["keyboard", "a matrix of tiles", "unforgettable", "a recording"])
def test_other_words_are_not(line: str) -> None:
    assert not list(findings(line))
