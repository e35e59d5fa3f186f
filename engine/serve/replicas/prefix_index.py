"""Server process: what the cache of one replica probably holds, by the keys of full blocks (block_manager.py).

It follows the cache without being told of it: a block is there once a prompt with it was sent, and the least recently
used goes first. Where it is wrong, a prompt is computed anew, and nothing else.
"""

from collections.abc import Sequence

UNKNOWN_SIZE = 1 << 14
"""Blocks that are kept in mind while the size of the cache is not known."""


class PrefixIndex:
    """The keys of at most `most` blocks."""

    def __init__(self, most: int = UNKNOWN_SIZE) -> None:
        self.most = most
        self._keys: dict[bytes, None] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._keys)

    def known(self, keys: Sequence[bytes]) -> int:
        """Blocks of the longest prefix of `keys` that is there."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """The blocks of a sequence are used now; its end is evicted before its beginning."""
        for key in reversed(keys):
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > self.most:
            del self._keys[next(iter(self._keys))]

    def discard(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
