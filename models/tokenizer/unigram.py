"""SentencePiece's Unigram, computed by the `tokenizers` library: the likeliest cut of a text into pieces.

XLM-RoBERTa and its descendants (BGE-M3, multilingual E5) use it. Text is normalized by a map in the file and cut at
spaces; each word is spelled with U+2581 in front. Source: Kudo 2018, "Subword Regularization"; `XLMRobertaTokenizer` in
the `transformers` library.
"""

from collections.abc import Sequence

from tokenizers import Tokenizer as Engine
from tokenizers import normalizers, pre_tokenizers
from tokenizers.models import Unigram as Model

from quengine.models.tokenizer.scored_bpe import SPACE
from quengine.models.tokenizer.vocabulary import TokenType, Vocabulary

_MATCHED = (TokenType.NORMAL, TokenType.BYTE)


class Unigram:
    """Cuts a piece of ordinary text (no added tokens in it) into ids.

    scores: the logarithm of each token's probability. charsmap: the map of normalizations, already checked
    (charsmap.py); empty: text stays as it is. merges_spaces: spaces at the ends and repeated ones are dropped.
    space_prefix: a space is put before the first word.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        scores: Sequence[float],
        unknown: int,
        charsmap: bytes,
        merges_spaces: bool,
        space_prefix: bool,
    ) -> None:
        # Words have no spaces, so a text with a space keeps tokens of other types from being matched.
        kinds = zip(vocabulary.texts, vocabulary.types, strict=True)
        texts = [text if kind in _MATCHED else f" {i}" for i, (text, kind) in enumerate(kinds)]
        matched = [score for score, kind in zip(scores, vocabulary.types, strict=True) if kind in _MATCHED]
        least = min(matched, default=0.0)  # unknown characters are scored below the least
        scored = [
            (text, score if kind in _MATCHED else least)
            for text, score, kind in zip(texts, scores, vocabulary.types, strict=True)
        ]
        falls_back = TokenType.BYTE in vocabulary.types
        self._engine = Engine(Model(vocab=scored, unk_id=unknown, byte_fallback=falls_back))
        if charsmap:
            self._engine.normalizer = normalizers.Precompiled(charsmap)
        words = [pre_tokenizers.WhitespaceSplit()] if merges_spaces else []
        scheme = "never" if not space_prefix else "always" if merges_spaces else "first"
        cut = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme)
        self._engine.pre_tokenizer = pre_tokenizers.Sequence([*words, cut])

    def encode(self, text: str, after_special: bool) -> list[int]:
        del after_special  # each piece begins with a word
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids
