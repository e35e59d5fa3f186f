"""SentencePiece's BPE: the neighbouring pair whose union is the best-scored token merges first.

Follows Kudo & Richardson 2018 (SentencePiece) and its `bpe_model.cc`: ties go to the leftmost pair. Merge ranks of
the `tokenizers` library cannot express a tie (in Mistral's vocabularies all runs of spaces have one score, and merge
from the left). So merging is done here, in O(n log n), word by word with a cache of words.
"""

import re
from functools import lru_cache
from heapq import heapify, heappop, heappush

from quengine.models.tokenizer.vocabulary import TokenizerError, TokenType, Vocabulary, byte_value

SPACE = "▁"
_MERGEABLE = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
_WORDS = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
_REMEMBERED_WORDS = 1 << 16
_LONGEST_REMEMBERED = 64


def scored_bytes(text: str) -> bytes:
    """The bytes of a token that spells spaces as U+2581."""
    return text.replace(SPACE, " ").encode()


class ScoredBPE:
    """Cuts a piece of ordinary text (no added tokens in it) into ids.

    `scores`: `tokenizer.ggml.scores`, by id. `space_prefix`: a space is put before a text's beginning and after each
    added token, so that a first word is spelled like a later one.
    """

    def __init__(self, vocabulary: Vocabulary, scores: list[float], space_prefix: bool) -> None:
        self._space_prefix = space_prefix
        kinds = list(zip(vocabulary.texts, vocabulary.types, strict=True))
        self._ids = {text: i for i, (text, kind) in enumerate(kinds) if kind in _MERGEABLE}
        # Merging pops the least of (cost, left end, right end).
        self._costs = {text: -scores[i] for text, i in self._ids.items() if len(text) > 1}
        self._byte_ids = {
            byte_value(text): i for i, (text, kind) in enumerate(kinds) if kind == TokenType.BYTE
        }
        self._unknown = vocabulary.named_ids.get("unk")
        # If no token continues past a word into the next one's space, nothing merges across that boundary.
        self._words_apart = not any(SPACE in text.lstrip(SPACE) for text in self._costs)
        self._remembered = lru_cache(_REMEMBERED_WORDS)(self._merge)

    def encode(self, text: str, after_special: bool) -> list[int]:
        spelled = text.replace(" ", SPACE)
        if self._space_prefix and after_special:
            spelled = SPACE + spelled
        words = _WORDS.findall(spelled) if self._words_apart else [spelled]
        ids: list[int] = []
        for word in words:
            ids += self._remembered(word) if len(word) <= _LONGEST_REMEMBERED else self._merge(word)
        return ids

    def _merge(self, word: str) -> tuple[int, ...]:
        """The ids of a word. Symbols are spans of `word`; `stop[start]` is a span's end, 0 where no span starts."""
        costs = self._costs
        size = len(word)
        stop = list(range(1, size + 1))
        before = list(range(-1, size))
        pairs = [
            (cost, left, left + 2)
            for left in range(size - 1)
            if (cost := costs.get(word[left : left + 2])) is not None
        ]
        heapify(pairs)
        while pairs:
            _, left, end = heappop(pairs)
            middle = stop[left]
            if not left < middle < end or stop[middle] != end:
                continue  # one of the pair has merged elsewhere since
            stop[left], stop[middle] = end, 0
            if end < size:
                before[end] = left
                further = stop[end]
                if (cost := costs.get(word[left:further])) is not None:
                    heappush(pairs, (cost, left, further))
            if (start := before[left]) >= 0 and (cost := costs.get(word[start:end])) is not None:
                heappush(pairs, (cost, start, end))
        return self._symbol_ids(word, stop)

    def _symbol_ids(self, word: str, stop: list[int]) -> tuple[int, ...]:
        ids: list[int] = []
        start = 0
        while start < len(word):
            symbol = word[start : stop[start]]
            found = self._ids.get(symbol)
            if found is None:
                ids += self._fallback(symbol)
            else:
                ids.append(found)
            start = stop[start]
        return tuple(ids)

    def _fallback(self, character: str) -> list[int]:
        """The ids of a character without a token: those of its UTF-8 bytes, or else the unknown token's."""
        ids = [self._byte_ids.get(byte) for byte in character.encode()]
        whole = [i for i in ids if i is not None]
        if len(whole) == len(ids):
            return whole
        if self._unknown is None:
            raise TokenizerError(
                f"the vocabulary has no token for {character!r}, no bytes and no unknown token"
            )
        return [self._unknown]
