"""Byte-level BPE: every byte is one printable character, and merges join characters within a word.

The byte alphabet is GPT-2's (openai/gpt-2 encoder.py, `bytes_to_unicode`); the merging is the `tokenizers` library's.
Which words a text is cut into is `pre_tokenizers`' business.
"""

from collections.abc import Iterator, Sequence

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as MergeEngine

from quengine.models.tokenizer.merges import merge_model, mergeable
from quengine.models.tokenizer.pre_tokenizers import DigitGroups, PreTokenizer
from quengine.models.tokenizer.vocabulary import Vocabulary


def _byte_alphabet() -> list[str]:
    """Printable Latin-1 bytes stand for themselves; the other 68 take code points 256, 257, ... in order."""
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
        # A byte that the vocabulary lacks gives no id, but still keeps its neighbours from merging: it gets
        # an id past the end for as long as merging lasts.
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
    """`text` cut into the groups of its runs of digits.

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
