"""BPE by merges, computed by the `tokenizers` library: byte-level, or over characters.

Byte-level BPE spells every byte as one printable character, in GPT-2's alphabet (openai/gpt-2 encoder.py,
`bytes_to_unicode`). Merges join characters within a word; `pre_tokenizers` cuts a text into words. BPE over characters
(Gemma 4) spells a space as U+2581 and a character without a token as its UTF-8 bytes; only the ends of lines divide a
text into words.
"""

import re
from collections.abc import Iterator, Sequence

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as MergeEngine

from quengine.models.tokenizer.pre_tokenizers import DigitGroups, PreTokenizer
from quengine.models.tokenizer.scored_bpe import SPACE
from quengine.models.tokenizer.vocabulary import TokenizerError, Vocabulary


def mergeable(
    vocabulary: Vocabulary, merges: Sequence[tuple[str, str]]
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The tokens that merging may give, text -> id, and the merges that lead to them, best first.

    Control tokens are excluded, so that no text becomes one unasked. The exception is a token that the file calls
    normal, that is a control token only by its text, and that the merges make: `</s>` in Qwen's vocabulary.
    """
    hidden = set(vocabulary.control_tokens)
    ordinary = {vocabulary.texts[i] for i in vocabulary.normal_controls}
    made = {left + right for left, right in merges if left + right in ordinary} if ordinary else set()
    hidden -= made
    ids = {text: i for text, i in vocabulary.ids.items() if text and text not in hidden}
    # If a merge occurs twice, the first counts.
    found = list(dict.fromkeys(merges))
    if any(left + right in hidden or left in hidden or right in hidden for left, right in found):
        found = [pair for pair in found if not hidden & {*pair, "".join(pair)}]
    return ids, found


def merge_model(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    ignore_merges: bool = False,
    byte_fallback: bool = False,
) -> models.BPE:
    """The `tokenizers` library's BPE. Raises TokenizerError for merges that do not fit the vocabulary."""
    try:
        return models.BPE(vocab=ids, merges=merges, ignore_merges=ignore_merges, byte_fallback=byte_fallback)
    except Exception as failure:  # the library raises no narrower type
        raise TokenizerError(f"the merges do not fit the vocabulary: {failure}") from None


def _byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable Latin-1 bytes stand for themselves, the other 68 for code points 256,
    257, ... in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    rest = (b for b in range(256) if b not in printable)
    stand_in = {b: chr(256 + n) for n, b in enumerate(rest)}
    return [stand_in.get(b, chr(b)) for b in range(256)]


BYTE_TO_CHAR = _byte_alphabet()
CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def byte_level_bytes(text: str) -> bytes:
    """The bytes of a token spelled in the byte alphabet; characters outside of it stand for themselves."""
    try:
        return bytes([CHAR_TO_BYTE[char] for char in text])
    except KeyError:
        return b"".join(
            bytes([CHAR_TO_BYTE[char]]) if char in CHAR_TO_BYTE else char.encode() for char in text
        )


class ByteLevelBPE:
    """Cuts a piece of ordinary text (no added tokens in it) into ids."""

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], splits: PreTokenizer
    ) -> None:
        self._size = len(vocabulary)
        ids, merges = mergeable(vocabulary, merges)
        # A byte that the vocabulary lacks gives no id, but still keeps its neighbours from merging: while merging
        # lasts it has an id past the end.
        missing = (char for char in BYTE_TO_CHAR if char not in ids)
        ids |= {char: self._size + n for n, char in enumerate(missing)}
        self._engine = MergeEngine(merge_model(ids, merges, ignore_merges=splits.ignore_merges))
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns]
            + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        self._digit_groups = splits.digit_groups

    def encode(self, text: str, after_special: bool) -> list[int]:
        del after_special  # a space prefix is sentencepiece's
        ids: list[int]
        if self._digit_groups is None:
            ids = self._engine.encode(text, add_special_tokens=False).ids
        else:
            pieces = list(_pieces(text, self._digit_groups))
            ids = self._engine.encode(pieces, is_pretokenized=True, add_special_tokens=False).ids
        return [i for i in ids if i < self._size] if max(ids, default=0) >= self._size else ids


def _pieces(text: str, groups: DigitGroups) -> Iterator[str]:
    """`text` cut at the boundaries of its groups of digits.

    One pass over the text: an expression that looks ahead to the end of a run would take quadratic time.
    """
    runs = pre_tokenizers.Split(Regex(groups.digits), "removed", invert=True)
    start = 0
    for _, (begin, end) in runs.pre_tokenize_str(text):
        for cut in range(begin + (end - begin) % 3, end + 1, 3):
            if start < cut and cut != (end if groups.cut_before else begin):
                yield text[start:cut]
                start = cut
    yield text[start:]


_NEWLINES = re.compile("(\n+)")


class CharacterBPE:
    """Cuts a piece of ordinary text (no added tokens in it) into ids."""

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], splits: PreTokenizer
    ) -> None:
        ids, merges = mergeable(vocabulary, merges)
        self._engine = MergeEngine(
            merge_model(ids, merges, ignore_merges=splits.ignore_merges, byte_fallback=True)
        )
        self._engine.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits.patterns]
        )
        newlines = {text: i for text, i in ids.items() if not text.strip("\n")}
        self._newlines = newlines if splits.whole_newlines else {}

    def encode(self, text: str, after_special: bool) -> list[int]:
        del after_special  # a space prefix is sentencepiece's
        ids: list[int] = []
        pieces = _NEWLINES.split(text) if self._newlines else [text]
        for piece in pieces:
            if (whole := self._newlines.get(piece)) is not None:
                ids.append(whole)
            elif piece:
                ids += self._engine.encode(piece.replace(" ", SPACE), add_special_tokens=False).ids
        return ids
