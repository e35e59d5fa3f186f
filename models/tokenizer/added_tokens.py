"""Cuts added tokens, which are matched by their text and never merged, out of a text.

The order is llama.cpp's (`tokenizer_st_partition`): all places of the longest token first, then those of the
next in what is left. Knows nothing of how the rest becomes tokens.
"""

from collections.abc import Iterable, Mapping


def partition(text: str, tokens: Iterable[Mapping[str, int]]) -> list[str | int]:
    """Pieces of `text` in order: ids where a token's text stood, strings between. No string is empty.

    `tokens` are mappings from text to id.
    """
    present = [(piece, token_id) for group in tokens for piece, token_id in group.items() if piece in text]
    present.sort(key=lambda item: -len(item[0].encode()))
    pieces: list[str | int] = [text] if text else []
    for piece, token_id in present:
        pieces = [part for old in pieces for part in _cut(old, piece, token_id)]
    return pieces


def _cut(old: str | int, piece: str, token_id: int) -> list[str | int]:
    if isinstance(old, int) or piece not in old:
        return [old]
    parts: list[str | int] = []
    for n, rest in enumerate(old.split(piece)):
        if n:
            parts.append(token_id)
        if rest:
            parts.append(rest)
    return parts
