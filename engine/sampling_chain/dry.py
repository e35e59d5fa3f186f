"""DRY ("don't repeat yourself", by p-e-w and pi6am): the longer the repetition that a token would continue, the less
likely it becomes.

The end of the history is searched in its last `dry_penalty_last_n` tokens. Where its last L tokens occur there too, the
token after them loses `dry_multiplier * dry_base^(L - dry_allowed_length)` of its logit, if L is at least
`dry_allowed_length`. A repetition does not reach over a sequence breaker, and a token that has one in it loses nothing.
"""

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from quengine.kernels.sampling import Floats, Ids
from quengine.models.tokenizer import Tokenizer
from quengine.request.sampling_params import SamplingParams

MAX_TAIL = 20
"""The most tokens of a breaker after the token in which it begins."""
_LOG_MAX = 88.7228391
"""The logarithm of the largest fp32 number, from which llama.cpp derives the largest exponent."""
_FEW = 16
"""The most new tokens that are added one by one."""


@dataclass(frozen=True)
class Breakers:
    """Where sequence breakers are in a history.

    Attributes:
        tails: for each token in which a breaker begins, the tokens that complete it; () if that token has all of it.
        begin, whole: bool [vocab_size], whether a breaker begins in a token, and whether a token has all of one.
    """

    tails: Mapping[int, frozenset[tuple[int, ...]]]
    begin: npt.NDArray[np.bool_]
    whole: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, tails: Mapping[int, frozenset[tuple[int, ...]]], vocab_size: int) -> "Breakers":
        begin, whole = np.zeros(vocab_size, np.bool_), np.zeros(vocab_size, np.bool_)
        begin[list(tails)] = True
        whole[[token for token, each in tails.items() if () in each]] = True
        return cls(tails, begin, whole)

    def distance(self, tokens: Ids) -> int:
        """The number of tokens after the last breaker in `tokens` [n]; n without one."""
        places: list[int] = np.flatnonzero(self.begin[tokens])[::-1].tolist()
        for place in places:
            behind = len(tokens) - 1 - place
            complete = [
                len(tail)
                for tail in self.tails[int(tokens[place])]
                if len(tail) <= behind and tuple(tokens[place + 1 : place + 1 + len(tail)].tolist()) == tail
            ]
            if complete:
                return behind - max(complete)
        return len(tokens)


class BreakerFinder:
    """Finds the tokens of a vocabulary in which sequence breakers begin, and caches the latest results."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self.find = lru_cache(maxsize=16)(self._find)

    def _find(self, texts: tuple[str, ...]) -> Breakers:
        tails: dict[int, set[tuple[int, ...]]] = {}
        for text in texts:
            raw = text.encode()
            whole = self._words.containing(raw)
            for token in whole:
                tails.setdefault(token, set()).add(())
            for length in range(1, len(raw)):
                ending = self._words.ending(raw[:length])
                if ending:
                    ids = self._tokenizer.encode(raw[length:].decode(errors="replace"))
                    for token in ending - whole:
                        tails.setdefault(token, set()).add(tuple(ids[:MAX_TAIL]))
        return Breakers.of({token: frozenset(each) for token, each in tails.items()}, self._vocab_size)

    @cached_property
    def _words(self) -> "_Words":
        """The tokens' bytes, without the space that encoding puts before a text."""
        tokenizer = self._tokenizer
        words = [tokenizer.token_bytes(token) for token in range(min(tokenizer.vocab_size, self._vocab_size))]
        if tokenizer.space_prefix:
            words = [
                word[1:] if word[:1] == b" " and not tokenizer.is_control(token) else word
                for token, word in enumerate(words)
            ]
        return _Words(words)


class _Words:
    """The bytes of all tokens in one array, which is searched in a few passes."""

    def __init__(self, words: Seq[bytes]) -> None:
        self._sizes = np.array([len(word) for word in words], dtype=np.int64)
        self._ends = np.cumsum(self._sizes)
        self._bytes = np.frombuffer(b"".join(words), dtype=np.uint8)

    def containing(self, raw: bytes) -> set[int]:
        """The tokens with `raw` in them."""
        places = np.arange(len(self._bytes) - len(raw) + 1)
        for offset, byte in enumerate(raw):
            places = places[self._bytes[places + offset] == byte]
        tokens = np.searchsorted(self._ends, places, side="right")
        return set(tokens[places + len(raw) <= self._ends[tokens]].tolist())

    def ending(self, raw: bytes) -> set[int]:
        """The tokens that end with `raw`."""
        tokens = np.flatnonzero(self._sizes >= len(raw))
        for offset, byte in enumerate(reversed(raw), 1):
            tokens = tokens[self._bytes[self._ends[tokens] - offset] == byte]
        return set(tokens.tolist())


class Dry:
    """The penalties for repetitions at the end of a growing history."""

    def __init__(self, params: SamplingParams, breakers: Breakers) -> None:
        self._params = params
        self._breakers = breakers
        self.reset()
        base = params.dry_base
        self._most = int(_LOG_MAX / math.log(base)) if base > 1.000001 else 0

    def reset(self) -> None:
        """Drops the history: the next one begins differently."""
        self._repeats = _Repeats(self._params.dry_penalty_last_n)

    def penalties(self, history: Seq[int]) -> tuple[Ids, Floats]:
        """Distinct token ids [n], and the numbers [n] to subtract from their logits."""
        params, least = self._params, self._params.dry_allowed_length
        tokens, lengths = self._repeats.of(history)
        reach = self._breakers.distance(tokens) if len(tokens) > least else -1
        places = np.flatnonzero(np.minimum(lengths, reach)[:-1] >= least) if reach >= least else ()
        if len(places) == 0:
            return np.empty(0, np.int64), np.empty(0)
        ids, which = np.unique(tokens[1:][places], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, which, np.minimum(lengths[places], reach))
        exponents = np.minimum(longest - least, self._most) if self._most else longest - least
        with np.errstate(over="ignore"):
            losses = params.dry_multiplier * params.dry_base ** exponents.astype(np.float64)
        hit = ~self._breakers.whole[ids]
        return ids[hit], losses[hit]


class _Repeats:
    """The last `window` tokens of a growing history (-1: all), and for each the length of the run up to it that the end
    of the history repeats."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._end = 0
        self._tokens = self._lengths = np.empty(0, np.int64)

    def of(self, history: Seq[int]) -> tuple[Ids, Ids]:
        """tokens [n] and lengths [n]: tokens[i - L + 1 .. i] are the last L tokens; the last length has no meaning."""
        new, last = len(history) - self._end, 0 if self._window < 0 else max(0, len(history) - self._window)
        if 0 <= new <= _FEW and self._end:
            for token in history[self._end :]:
                before = np.concatenate(([0], self._lengths[:-1]))
                self._lengths = np.append(np.where(self._tokens == token, before + 1, 0), 0)
                self._tokens = np.append(self._tokens, token)
        else:
            self._tokens = np.array(history[last:], dtype=np.int64)
            self._lengths = np.array(_suffix_lengths(history[last:]), dtype=np.int64)
        self._end = len(history)
        kept = len(history) - last
        self._tokens, self._lengths = self._tokens[-kept:], self._lengths[-kept:]
        return self._tokens, np.minimum(self._lengths, np.arange(1, kept + 1))


def _suffix_lengths(tokens: Seq[int]) -> list[int]:
    """For each place except the last, the length of the run up to it that equals the end of `tokens` (the Z algorithm,
    backwards)."""
    reverse, count = tokens[::-1], len(tokens)
    lengths, begin, end = [0] * count, 0, 0
    for k in range(1, count):
        same = min(end - k, lengths[k - begin]) if k < end else 0
        while k + same < count and reverse[same] == reverse[k + same]:
            same += 1
        lengths[k] = same
        if k + same > end:
            begin, end = k, k + same
    return lengths[::-1]
