"""WordPiece, computed by the `tokenizers` library: it takes the longest tokens of a word, from its beginning on.

GGUF files spell a token that begins a word with U+2581 in front, and one that continues a word without a mark; BERT's
own vocabularies have `##` in front of the latter. Text is cleaned, cut at spaces and punctuation and, if the file says
so, made lower case and stripped of accents. Source: Devlin et al. 2018, "BERT", and its reference implementation.
"""

from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers, pre_tokenizers

from quengine.models.tokenizer.scored_bpe import SPACE
from quengine.models.tokenizer.vocabulary import Vocabulary

_LONGEST_WORD = 100
"""Characters of a word; a longer one is the unknown token, as in BERT's tokenizer."""


class WordPiece:
    """Cuts a piece of ordinary text (no added tokens in it) into ids."""

    def __init__(self, vocabulary: Vocabulary, unknown: str, lowers: bool, strips_accents: bool) -> None:
        hidden = vocabulary.control_tokens
        ids = {_own_spelling(text): i for text, i in vocabulary.ids.items() if text not in hidden}
        ids[unknown] = vocabulary.ids[unknown]
        model = models.WordPiece(vocab=ids, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD)
        self._engine = Engine(model)
        self._engine.normalizer = normalizers.BertNormalizer(
            clean_text=True, handle_chinese_chars=True, strip_accents=strips_accents, lowercase=lowers
        )
        self._engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()

    def encode(self, text: str, after_special: bool) -> list[int]:
        del after_special  # a space prefix is sentencepiece's
        ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids


def _own_spelling(text: str) -> str:
    """BERT's spelling of a token: its letters if it begins a word, else `##` and its letters."""
    return text[len(SPACE) :] if text.startswith(SPACE) else f"##{text}"


def word_bytes(text: str) -> bytes:
    """The bytes of a token, with a space before one that begins a word."""
    return text.replace(SPACE, " ").encode()
