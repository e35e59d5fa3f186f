"""Drafts from a sequence itself: what followed the same tokens the last time (prompt lookup, Saxena 2023)."""

from collections.abc import Sequence


class NgramIndex:
    """Where each run of `longest` tokens, and of fewer down to half of them, was last followed in a growing sequence.

    Shorter ones, which recur by chance, gave drafts that were wrong too often (docs/speculative.md). A token is indexed
    once, when it comes; a draft takes one look-up for each length of run.
    """

    def __init__(self, longest: int) -> None:
        self._lengths = range(longest, (longest - 1) // 2, -1)
        self._next: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]
        self._indexed = 1  # tokens before this one are in it, each as what follows the runs before it

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to `most` tokens that may follow `tokens`; none where no run at their end was there before.

        The longest such run counts, at its latest occurrence. From call to call `tokens` grows. What followed may reach
        the end: a sequence that repeats itself is drafted to go on doing so.
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
        """Where the longest run at the end was followed before."""
        for length in self._lengths:
            if length < len(tokens):
                index = self._next[length].get(tuple(tokens[len(tokens) - length :]))
                if index is not None:
                    return index
        return None
