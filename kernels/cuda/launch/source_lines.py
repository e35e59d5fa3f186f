"""The lines of a function's source without tokenizing them.

Triton keeps the source of every kernel, and `inspect.getblock` finds the end of each by Python's tokenizer: half of the
time that the modules with kernels take to import. A function that begins in the first column ends with the last line
that is indented, or that closes its signature; where that might be wrong, the tokenizer decides.
"""

import inspect
from collections.abc import Sequence

_tokenized = inspect.getblock


def use_quick_source_lines() -> None:
    """From now on `inspect` finds the ends of functions so, in this process."""
    inspect.getblock = block


def block(lines: Sequence[str]) -> Sequence[str]:
    """As `inspect.getblock`: those of `lines` that belong to the definition on the first ones."""
    if lines[0][0].isspace():
        return _tokenized(lines)
    end, defined, follows = 0, False, "\n"
    for number, line in enumerate(lines, 1):
        if line[0].isspace():
            end = end if line.isspace() else number
        elif line[0] == ")" or (not defined and line.startswith(("@", "def "))):
            end, defined = number, defined or line[0] == "d"
        else:
            follows = line
            break
    found = list(lines[:end])
    text = "".join(found)
    certain = (
        defined
        and (follows[0].isidentifier() or follows[0] in "@\n")
        and "\\\n" not in text
        and not found[-1].lstrip().startswith("#")
        and not any(text.count(quotes) % 2 for quotes in ('"""', "'''"))
        and all(text.count(left) == text.count(right) for left, right in ("()", "[]", "{}"))
    )
    return found if certain else _tokenized(lines)
