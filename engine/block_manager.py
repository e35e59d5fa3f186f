"""Who owns which block of a paged cache, and what free blocks still hold.

A block is owned by every sequence whose table names it. Only full blocks are shared, and only when everything up to
their end is equal, so a shared block is never written again. A free block keeps its content, and can be found by
it, until it is needed for another; the one that was used longest ago goes first. Knows tokens and block numbers;
neither tensors nor requests.
"""

import itertools
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

Key = tuple[int, tuple[int, ...]]
"""Content of a full block: the number of the content before it (0: none), and its own token ids. Compared as it is,
so that equal hashes of different contents are told apart."""


@dataclass
class _Block:
    """`content` numbers what the block holds with all before it, 0 while that is not known; `key` is what it can be
    found by, None for a second block of the same content."""

    owners: int = 0
    content: int = 0
    key: Key | None = None


@dataclass(frozen=True)
class Allocation:
    """A new block table; its blocks hold the first `num_cached_tokens` tokens already."""

    block_table: list[int]
    num_cached_tokens: int


class BlockManager:
    """`num_blocks` blocks of `block_size` positions, all free at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._empty = list(reversed(range(num_blocks)))
        self._kept: dict[int, None] = {}  # free blocks with content, the longest unused first
        self._by_key: dict[Key, int] = {}
        self._contents = itertools.count(1)

    @property
    def num_free(self) -> int:
        """Blocks without an owner."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - self.num_free

    def blocks_for(self, positions: int) -> int:
        """How many blocks hold so many positions."""
        return -(-positions // self.block_size)

    def allocate(self, prefix: Seq[int], positions: int, reserve: int = 0) -> Allocation | None:
        """A table for `positions` positions, of which full blocks that hold the beginning of `prefix` are shared.

        None, and nothing changes, where fewer than `reserve` blocks would be left free.
        """
        assert len(prefix) <= positions
        shared = self._match(prefix)
        new = self.blocks_for(positions) - len(shared)
        woken = sum(self._blocks[block].owners == 0 for block in shared)
        if new + woken + reserve > self.num_free:
            return None
        for block in shared:
            self._kept.pop(block, None)
            self._blocks[block].owners += 1
        return Allocation(shared + [self._take() for _ in range(new)], len(shared) * self.block_size)

    def grow(self, table: list[int], positions: int) -> bool:
        """Append blocks until the table covers `positions`; False, and nothing changes, where too few are free."""
        new = self.blocks_for(positions) - len(table)
        if new > self.num_free:
            return False
        table += [self._take() for _ in range(new)]
        return True

    def computed(self, table: Seq[int], token_ids: Seq[int]) -> None:
        """The table's blocks hold `token_ids` from its beginning on: the full ones can be shared from now on."""
        before = 0
        for index in range(len(token_ids) // self.block_size):
            block = self._blocks[table[index]]
            if not block.content:
                own = tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])
                self._name(table[index], (before, own))
            before = block.content

    def free(self, table: Iterable[int]) -> None:
        """Give up an owner's blocks. A text's end is forgotten before its beginning."""
        for number in reversed(list(table)):
            block = self._blocks[number]
            assert block.owners > 0, f"block {number} is freed and has no owner"
            block.owners -= 1
            if block.owners:
                continue
            if block.key is None:
                block.content = 0
                self._empty.append(number)
            else:
                self._kept[number] = None

    def discard(self, table: Iterable[int]) -> None:
        """Share what these blocks hold with nobody else: it may be wrong."""
        for number in table:
            block = self._blocks[number]
            if block.key is not None:
                del self._by_key[block.key]
                block.key = None

    def forget(self) -> None:
        """What free blocks hold is not valid any more."""
        while self._kept:
            self._empty.append(self._evict())

    def _match(self, prefix: Seq[int]) -> list[int]:
        """The blocks that hold the longest beginning of `prefix`, as far as it fills blocks."""
        found: list[int] = []
        before = 0
        for start in range(0, len(prefix) - self.block_size + 1, self.block_size):
            block = self._by_key.get((before, tuple(prefix[start : start + self.block_size])))
            if block is None:
                break
            found.append(block)
            before = self._blocks[block].content
        return found

    def _name(self, number: int, key: Key) -> None:
        """Note what a block holds; of two with the same content the first can be found."""
        block = self._blocks[number]
        first = self._by_key.get(key)
        if first is not None:
            block.content = self._blocks[first].content
            return
        block.content, block.key = next(self._contents), key
        self._by_key[key] = number

    def _take(self) -> int:
        """A free block for one owner, without content."""
        number = self._empty.pop() if self._empty else self._evict()
        self._blocks[number].owners = 1
        return number

    def _evict(self) -> int:
        """Forget the content of the free block that was used longest ago."""
        number = next(iter(self._kept))
        del self._kept[number]
        block = self._blocks[number]
        assert block.key is not None and block.owners == 0
        del self._by_key[block.key]
        block.content, block.key = 0, None
        return number
