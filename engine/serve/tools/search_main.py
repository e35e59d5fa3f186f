"""Searches a folder for files by name, or for lines by a pattern, in a process of its own.

A pattern can take forever to match, and a tree to walk: the server ends this process when its time is over. It imports
the standard library alone and is run by its path. Argument: the descriptor of the folder, or of the only file. Input:
one JSON object, see `search.py`; output: {"rows": [...], "total": N, "cut": BOOL}. Links are not followed.
"""

import json
import os
import re
import stat
import sys
from collections.abc import Iterator
from typing import Any

JUNK = frozenset(
    (
        *(".git", ".svn", ".hg", "node_modules", "__pycache__", ".venv", "venv"),
        *("dist", "build", "target", ".cache", ".idea", ".vscode"),
    )
)
"""Folders that are listed, and not walked."""
MAX_BYTES = 16 << 20
"""Of a file whose lines are searched."""
MAX_LINE = 500
"""Characters of a line that is shown."""


def glob_pattern(glob: str) -> re.Pattern[str]:
    """`*` and `?` stay within a folder, `**` does not. Without a / it is matched with the name alone (`matched`)."""
    parts = re.findall(r"\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\]|.", glob, re.DOTALL)
    plain = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    translated = (
        plain.get(part) or ("[" + part[1:].replace("!", "^", 1) if len(part) > 2 else re.escape(part))
        for part in parts
    )
    return re.compile("".join(translated), re.DOTALL)


class Glob:
    def __init__(self, glob: str) -> None:
        self._by_name = "/" not in glob
        anchored = glob.startswith(("**/", "/")) or self._by_name
        self._pattern = glob_pattern(glob if anchored else f"**/{glob}")

    def matched(self, path: str) -> bool:
        return self._pattern.fullmatch(path.rpartition("/")[2] if self._by_name else path) is not None


def walk(folder: int, depth: int) -> Iterator[tuple[str, bool, str, int]]:
    """(path, whether it is a folder, name, descriptor of the folder it is in) of all in `folder`, by name.

    `depth` 0: however deep.
    """
    for where, folders, files, descriptor in os.fwalk(".", dir_fd=folder, follow_symlinks=False):
        above = where[2:] + "/" if where != "." else ""
        for name in sorted([*folders, *files]):
            try:
                mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            except OSError:
                continue
            if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                yield above + name, stat.S_ISDIR(mode), name, descriptor
        deepest = depth and above.count("/") + 1 >= depth
        folders[:] = [] if deepest else sorted(name for name in folders if name not in JUNK)


def find(folder: int, given: dict[str, Any]) -> dict[str, Any]:
    include, exclude = Glob(given["include"]), Glob(given["exclude"]) if given["exclude"] else None
    rows: list[list[Any]] = []
    total = 0
    for path, is_folder, _, _ in walk(folder, given["max_depth"]):
        if given["type"] not in ("all", "dir" if is_folder else "file"):
            continue
        if include.matched(path) and not (exclude and exclude.matched(path)):
            total += 1
            if len(rows) < given["limit"]:
                rows.append([path, is_folder])
    return {"rows": rows, "total": total, "cut": total > len(rows)}


def lines_of(descriptor: int) -> list[str]:
    """The lines of a file; none if it is too large or no text."""
    with os.fdopen(descriptor, "rb") as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES or b"\0" in content[:8192]:
        return []
    return content.decode(errors="replace").split("\n")


def files_of(folder: int, given: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Each file's path and descriptor. A single file has the caller's descriptor."""
    if stat.S_ISREG(os.fstat(folder).st_mode):
        yield given["path"], folder
        return
    include, exclude = Glob(given["include"]), Glob(given["exclude"]) if given["exclude"] else None
    for path, is_folder, name, above in walk(folder, 0):
        if is_folder or not include.matched(path) or (exclude and exclude.matched(path)):
            continue
        try:
            yield path, os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=above)
        except OSError:
            continue


def grep(folder: int, given: dict[str, Any]) -> dict[str, Any]:
    """Rows: path, line number, text, whether it is a match and not a line around one."""
    source = re.escape(given["pattern"]) if given["literal"] else given["pattern"]
    pattern = re.compile(source, re.IGNORECASE if given["ignore_case"] else 0)
    rows: list[list[Any]] = []
    around, total = given["context_lines"], 0
    for path, descriptor in files_of(folder, given):
        lines = lines_of(descriptor)
        for at, line in enumerate(lines):
            if not pattern.search(line):
                continue
            if total == given["limit"]:
                return {"rows": rows, "total": total, "cut": True}
            total += 1
            for near in range(max(0, at - around), min(len(lines), at + around + 1)):
                rows.append([path, near + 1, lines[near][:MAX_LINE], near == at])
    return {"rows": rows, "total": total, "cut": False}


def main() -> None:
    given = json.load(sys.stdin)
    try:
        answer = (grep if "pattern" in given else find)(int(sys.argv[1]), given)
    except re.error as error:
        answer = {"error": f"the pattern is wrong: {error}"}
    except (RecursionError, MemoryError, OverflowError):
        answer = {"error": "the pattern is too large"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
