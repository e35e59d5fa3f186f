"""BPE over characters, with spaces spelled U+2581 and a character without a token as its UTF-8 bytes (Gemma 4).

Nothing but the ends of lines divides a text into words. The merging is the `tokenizers` library's.
"""

import re
from collections.abc import Sequence

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as MergeEngine

from quengine.models.tokenizer.merges import merge_model, mergeable
from quengine.models.tokenizer.pre_tokenizers import PreTokenizer
from quengine.models.tokenizer.scored_bpe import SPACE
from quengine.models.tokenizer.vocabulary import Vocabulary

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
