"""The one error of the GGUF reader, with the place in the file."""

from pathlib import Path

from quengine.errors import EngineError


def shown(text: str | bytes, limit: int = 80) -> str:
    """A name from a file as one printable, bounded piece of an error message."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "backslashreplace")
    cut = text if len(text) <= limit else text[:limit] + "..."
    return cut if cut.isprintable() and cut == cut.strip() and cut else repr(cut)


class GGUFError(EngineError):
    """A GGUF file that cannot be used as it is.

    `path` is the file, `field` the metadata key, tensor or header field, or "file", `offset` the byte in the file
    where that field's value lies, or None where the trouble is that something is absent.
    """

    def __init__(self, path: Path, field: str, problem: str, offset: int | None = None) -> None:
        self.path = path
        self.field = field
        self.problem = problem
        self.offset = offset
        at = "" if offset is None else f" (byte {offset})"
        super().__init__(f"{path}: {problem}" if field == "file" else f"{path}: {field}{at}: {problem}")
