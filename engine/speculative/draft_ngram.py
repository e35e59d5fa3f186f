"""Look-up drafts: what followed the same n-gram earlier in the sequence (prompt lookup, Saxena 2023)."""

from collections.abc import Sequence


class NgramIndex:
    """The last continuation of each n-gram of a growing sequence, for n from `longest` down to half of it.

    Shorter n-grams, which recur by chance, gave too many wrong drafts (docs/speculative.md). Each token is indexed
    once, when it is appended; a draft takes one look-up per length.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = range(longest, (longest - 1) // 2, -1)
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]
        # tokens before this index are indexed, each as the continuation of the n-grams before it
        self._indexed = 1

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`; empty if no n-gram at its end has occurred before.

        The longest such n-gram counts, at its latest occurrence. From call to call `tokens` grows. If the continuation
        reaches the end of the sequence, it is extended periodically.
        """
        self._index(tokens)
        start = self._after_run(tokens)
        if start is None:
            return []
        found: list[int] = []
        for index in range(start, start + most):
            found.append(tokens[index] if index < len(tokens) else found[index - len(tokens)])
        return found

    def _index(self, tokens: Sequence[int]) -> None:
        for index in range(self._indexed, len(tokens)):
            for length in self._lengths:
                if length <= index:
                    self._next[length][tuple(tokens[index - length : index])] = index
        self._indexed = max(self._indexed, len(tokens))

    def _after_run(self, tokens: Sequence[int]) -> int | None:
        """The index after the latest earlier occurrence of the longest n-gram at the end; None if there is none."""
        for length in self._lengths:
            if length < len(tokens):
                index = self._next[length].get(tuple(tokens[len(tokens) - length :]))
                if index is not None:
                    return index
        return None
