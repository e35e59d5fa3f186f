"""Server process: what the cache of one replica probably holds, by the keys of full blocks (block_manager.py).

It predicts the cache: a block is there once a prompt with it was sent, and the least recently used block is evicted
first. If it is wrong, a prompt is computed again, and nothing else happens.
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
        """The number of blocks in the longest prefix of `keys` that is there."""
        return next((index for index, key in enumerate(keys) if key not in self._keys), len(keys))

    def add(self, keys: Sequence[bytes]) -> None:
        """Marks the blocks of a sequence as just used; its end is evicted before its beginning."""
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
