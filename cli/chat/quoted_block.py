"""Messages of several lines, between lines that begin and end with three quotation marks."""

from collections.abc import Iterator

QUOTES = '"""'


def is_open(text: str) -> bool:
    """Whether a block of several lines has begun in `text` and not ended."""
    ended = len(text.rstrip()) >= 2 * len(QUOTES) and text.rstrip().endswith(QUOTES)
    return text.startswith(QUOTES) and not ended


def joined(lines: Iterator[str]) -> Iterator[str]:
    """The lines, those of a block as one, without its quotation marks; a block is a message, whatever is in it."""
    for line in lines:
        if not line.startswith(QUOTES):
            yield line
            continue
        text = line
        while is_open(text) and (following := next(lines, None)) is not None:
            text += f"\n{following}"
        block = text.removeprefix(QUOTES).rstrip().removesuffix(QUOTES).strip("\n")
        yield f"/{block}" if block.startswith("/") else block
