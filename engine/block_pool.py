"""The pool of blocks of one cache group: which are free, what free ones still hold, and which of these goes first."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, blocks_for


@dataclass(frozen=True)
class CachePool:
    """The blocks of one cache group: the padding block 0, and blocks 1 .. `num_blocks`.

    window: positions that attention sees, the token's own included; None: all.
    chunk: most tokens of a sequence that a step computes; used where there is a window.
    is_state: a block is the state of a sequence, whatever its length.
    rewinds: positions by which a state can be rolled back.
    spares: copies that each sequence has beside its state.
    checkpoints: blocks beyond those that sequences need, for checkpoints.
    cold: blocks num_blocks + 1 .. num_blocks + `cold`, in host memory, for checkpoints that had to make room.
    """

    num_blocks: int
    window: int | None = None
    chunk: int = 0
    is_state: bool = False
    rewinds: int = 0
    spares: int = 0
    checkpoints: int = 0
    cold: int = 0

    def first_visible(self, position: int) -> int:
        """Index in a block table of the first block that tokens at `position` or later attend to."""
        return 0 if self.window is None else max(0, position - self.window + 1) // BLOCK_SIZE

    def most_blocks(self, positions: int) -> int:
        """Blocks that a sequence of `positions` positions owns at once."""
        every = 1 + self.spares if self.is_state else blocks_for(positions)
        return every if self.window is None else min(every, blocks_for(self.window + self.chunk) + 1)


class BlockCopy(NamedTuple):
    """A copy that is to be made in cache group `group`, of block `source` to block `target`."""

    group: int
    source: int
    target: int


CopyBlocks = Callable[[Seq[BlockCopy]], None]
"""Copies blocks in this order: after the steps launched so far, before all later ones."""


class BlockPool:
    """The blocks of one cache group.

    `by_key` maps keys to full blocks. A free block is either in `_empty`, or, if its content can still be found, in
    `_kept`, in the order of last use. `cold` maps keys to blocks in host memory, in that order as well.
    """

    def __init__(self, shape: CachePool, group: int, copy_blocks: CopyBlocks) -> None:
        self.shape = shape
        self.by_key: dict[bytes, int] = {}
        self.cold: dict[bytes, int] = {}
        self.to_host = self.from_host = 0
        self._on_the_way = set[bytes]()  # keys of checkpoints that are evicted first until they are used
        self._group, self._copy_blocks = group, copy_blocks
        self._empty_cold = list(range(shape.num_blocks + shape.cold, shape.num_blocks, -1))
        self._owners = [0] * (shape.num_blocks + 1)
        self._keys: dict[int, bytes] = {}
        self._empty = list(range(shape.num_blocks, 0, -1))
        self._kept: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._kept)

    def count_free(self, blocks: Seq[int]) -> int:
        return sum(not self._owners[number] for number in blocks)

    def end(self, start: int, positions: int) -> int:
        """The length of a table that covers `positions`, in a step that begins at position `start`."""
        return min(blocks_for(positions), self.shape.first_visible(start) + self.shape.most_blocks(positions))

    def missing(self, found: int, positions: int) -> int:
        """Number of blocks that a table for `positions` still needs if it has its first `found`."""
        if self.shape.is_state:
            return 1 + self.shape.spares
        return self.end(found * BLOCK_SIZE, positions) - found

    def holds(self, key: bytes) -> bool:
        """Whether there is a block with this key, on the device or in host memory."""
        return key in self.by_key or key in self.cold

    def checkpoint_of(self, key: bytes) -> int:
        """The block with this key, marked as the most recently used one; on the device, if it is there."""
        self._on_the_way.discard(key)
        if key in self.cold:
            self.cold[key] = self.cold.pop(key)
            if key not in self.by_key:
                self.from_host += 1
                return self.cold[key]
        number = self.by_key[key]
        if number in self._kept:
            self._kept[number] = self._kept.pop(number)
        return number

    def keep_new(self, key: bytes, evicted_first: bool) -> int:
        """Registers a free block, which stays free, for new content with this key; returns its number."""
        number = self.take()
        self.keep(number, key, evicted_first)
        return number

    def keep(self, number: int, key: bytes | None, evicted_first: bool) -> None:
        """Releases a block, and registers it under `key`, if any. `evicted_first`: before others, until it is used."""
        if key is not None:
            self.name(number, key)
        self.release([number])
        if evicted_first and number in self._kept:
            self._kept = {number: None, **self._kept}
            self._on_the_way.add(self._keys[number])

    def blocks_of(self, keys: Seq[bytes], count: int) -> list[int]:
        """The cached blocks of keys[:count] that the next token attends to; none for states, which are not shared."""
        if self.shape.is_state:
            return []
        first = self.shape.first_visible(count * BLOCK_SIZE)
        return [self.by_key[key] for key in keys[first:count]]

    def own(self, blocks: Seq[int]) -> None:
        for number in blocks:
            self._kept.pop(number, None)
            self._owners[number] += 1

    def take(self, spared: int = PADDING_BLOCK) -> int:
        """Takes a free block, evicting the least recently used content if need be, and gives it one owner. `spared`: a
        block in host memory that keeps its content, as it is about to be copied."""
        if not self._empty:
            number = next(iter(self._kept))
            self._move_to_host(number, spared)
            self._unname(self._keys[number])
        number = self._empty.pop()
        self._owners[number] = 1
        return number

    def _move_to_host(self, number: int, spared: int) -> None:
        """Copies a block that is about to be evicted to host memory, if there is some and it is not there yet."""
        key = self._keys[number]
        if key in self.cold:
            self.cold[key] = self.cold.pop(key)
            return
        if not self._empty_cold:
            oldest = next((each for each, held in self.cold.items() if held != spared), None)
            if oldest is None:
                return
            self._empty_cold.append(self.cold.pop(oldest))
        target = self._empty_cold.pop()
        self.cold = {key: target, **self.cold} if key in self._on_the_way else {**self.cold, key: target}
        self.to_host += 1
        self._copy_blocks([BlockCopy(self._group, number, target)])

    def release(self, blocks: Iterable[int]) -> None:
        for number in blocks:
            assert self._owners[number] > 0, f"block {number} is freed and has no owner"
            self._owners[number] -= 1
            if self._owners[number]:
                continue
            if number in self._keys:
                self._kept[number] = None
            else:
                self._empty.append(number)

    def release_hidden(self, table: list[int], start: int) -> None:
        """Releases the blocks that no position from `start` on attends to."""
        first = end = self.shape.first_visible(start)
        while first and table[first - 1] != PADDING_BLOCK:
            first -= 1
        if first < end:
            self.release(table[first:end])
            table[first:end] = [PADDING_BLOCK] * (end - first)

    def name(self, number: int, key: bytes) -> None:
        """Registers a block under its key, unless another block with the same content already is."""
        if key not in self.by_key:
            self.by_key[key], self._keys[number] = number, key

    def unname(self, key: bytes) -> None:
        """Removes the blocks with this key from the prefix cache, if there are any."""
        self._unname(key)
        if key in self.cold:
            self._empty_cold.append(self.cold.pop(key))

    def _unname(self, key: bytes) -> None:
        """As `unname`, for the block on the device alone."""
        if key in self.by_key:
            number = self.by_key.pop(key)
            del self._keys[number]
            self._on_the_way.discard(key)
            if number in self._kept:
                del self._kept[number]
                self._empty.append(number)

    def reset(self) -> None:
        for number in list(self._kept):
            self.unname(self._keys[number])
        for key in list(self.cold):
            self.unname(key)
