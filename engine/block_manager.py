"""Block manager of the paged KV cache: which sequences own which blocks, and what free blocks still hold.

The layers of a model form cache groups (ModelConfig.cache_groups). Each group has a pool of blocks, and each sequence
has one block table per group. A block may be owned by several sequences, and is owned by each whose table lists it.
Only full blocks are shared, and only if all tokens up to the block's end are equal, so a shared block is never written
again. A prompt whose next tokens are the beginning of a cached block (a full one, or the last one of a sequence that
has ended) takes a copy of it, and computes the rows from the first different token on. A free block keeps its content,
and can be found by it (prefix cache), until the block is reallocated; the least recently used block goes first.

In a group whose attention has a window W, the token at position p attends to positions p-W+1 .. p. A block that no
remaining position attends to is released, and its entry in the table becomes the padding block.

In a group of layers that keep a state, a block is a state. A sequence has one from admission to release, the first
entry of its table. The next entries are copies for itself: `CachePool.spares`, for drafts, and, where there is room,
the state at the end of its last full block. Blocks without an owner hold checkpoints: copies of states at the ends of
full blocks, found by the same keys. A checkpoint that a prefill step writes has an owner until that step is launched. A
prefix is found if every group holds it, so it ends at a checkpoint.

The least recently used checkpoints make room for others. They move to host memory where the pool has some
(`CachePool.cold`), and are copied back for a prompt that goes on from them. Blocks in host memory have the numbers
after those on the device.
"""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from quengine.block_pool import BlockCopy, BlockPool, CachePool, CopyBlocks
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK

LEAST_COPIED = 8
"""A block is copied for a prompt that has at least this many of its first tokens; fewer are computed as quickly."""
_MOST_BEGINNINGS = 4
"""Of the blocks that follow a block, at most this many are registered by their tokens."""
_FEW = 1024


class CheckpointCounts(NamedTuple):
    """Numbers of checkpoints on the device and in host memory, and of those moved to and from host memory so far."""

    on_device: int = 0
    in_host: int = 0
    to_host: int = 0
    from_host: int = 0


@dataclass(frozen=True)
class Allocation:
    """New block tables, one per cache group, whose blocks already hold the first `num_cached_tokens` tokens.

    copies: to be made before the next step: in groups with a state, of the checkpoint; in others, of the block that
    begins with the prompt's next tokens.
    num_held_tokens: the tokens whose keys and values are in the cache; more than `num_cached_tokens` if there is no
    checkpoint at their end.
    """

    block_tables: tuple[list[int], ...]
    num_cached_tokens: int
    copies: tuple[BlockCopy, ...] = ()
    num_held_tokens: int = 0


def extend_keys(keys: list[bytes], token_ids: Seq[int]) -> None:
    """Appends the keys of the full blocks of `token_ids` that `keys` does not cover yet.

    The key of a block is the SHA-256 of the previous block's key followed by the block's token ids (int64), so it
    identifies all tokens up to the block's end.
    """
    for start in range(len(keys) * BLOCK_SIZE, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
        keys.append(_key(keys[-1] if keys else b"", token_ids[start : start + BLOCK_SIZE]))


def _key(before: bytes, tokens: Seq[int]) -> bytes:
    return sha256(before + array("q", tokens).tobytes()).digest()


class _Beginning(NamedTuple):
    """A cached block whose first tokens later prompts may share: its key, and its tokens."""

    key: bytes
    tokens: Seq[int]


class BlockManager:
    """The blocks of all cache groups, all of them free at first. `pools`: one per cache group. `copy_blocks`: moves
    checkpoints to host memory at once, before their blocks are written again."""

    def __init__(self, pools: Seq[CachePool], copy_blocks: CopyBlocks = lambda _copies: None) -> None:
        self._copy_blocks = copy_blocks
        self._pools = [BlockPool(pool, n, copy_blocks) for n, pool in enumerate(pools)]
        self._paged_groups = [n for n, pool in enumerate(pools) if not pool.is_state]
        self._paged = [self._pools[n] for n in self._paged_groups]
        self._states = [pool for pool in self._pools if pool.shape.is_state]
        self._kept_copies = 0  # number of sequences with a copy of the state at the end of a block
        self._beginnings: dict[bytes, list[_Beginning]] = {}  # the newest ones after the block with each key

    @property
    def num_free(self) -> int:
        """Number of free blocks in the pool that has the fewest. Pools of states do not count: no sequence outgrows
        them."""
        return min(pool.num_free for pool in self._paged)

    @property
    def num_used(self) -> int:
        """Number of owned blocks in the pool that has the most, pools of states aside."""
        return max(pool.shape.num_blocks - pool.num_free for pool in self._paged)

    @property
    def has_states(self) -> bool:
        """Whether there are groups with a state."""
        return bool(self._states)

    @property
    def checkpoints(self) -> CheckpointCounts:
        """The counts of the group with states that has the most checkpoints."""
        counts = (
            CheckpointCounts(len(pool.by_key), len(pool.cold), pool.to_host, pool.from_host)
            for pool in self._states
        )
        return max(counts, default=CheckpointCounts())

    def covered(self, tables: Seq[Seq[int]]) -> int:
        """Number of positions that these block tables cover."""
        return min([len(tables[group]) for group in self._paged_groups]) * BLOCK_SIZE

    def fits(self, positions: int) -> bool:
        """Whether a sequence of `positions` positions fits into the cache when no other sequence is running."""
        return all(pool.shape.most_blocks(positions) <= pool.shape.num_blocks for pool in self._pools)

    def allocate(
        self, keys: Seq[bytes], positions: int, reserve: int = 0, tokens: Seq[int] = (), most: int = 0
    ) -> Allocation | None:
        """Block tables for `positions` positions, which share the blocks of the longest prefix that all groups hold.

        `keys`: the keys of the prompt's full blocks. `tokens`: the prompt's tokens, of which `most` may come from the
        cache; a cached block that begins with the tokens after the shared blocks is copied. In a group with a window
        the table covers as much as the first steps need. Returns None, with no block allocated, if a pool has too few
        free blocks, or would be left with fewer than `reserve` (pools of states need no reserve).
        """
        found = _match(self._pools, keys)
        held = _match(self._paged, keys) if self._states else found
        shared = [pool.blocks_of(keys, found) for pool in self._pools]
        new = [pool.missing(found, positions) for pool in self._pools]
        for pool, blocks, count in zip(self._pools, shared, new, strict=True):
            needed = count + pool.count_free(blocks) + (0 if pool.shape.is_state else reserve)
            if needed > pool.num_free:
                return None
        before = keys[found - 1] if found else b""
        start = found * BLOCK_SIZE
        source_key, common = self._beginning_of(before, tokens[start : min(start + BLOCK_SIZE, most)])
        tables, copies = [], []
        for group, (pool, blocks, count) in enumerate(zip(self._pools, shared, new, strict=True)):
            if pool.shape.is_state:
                source = pool.checkpoint_of(keys[found - 1]) if found else PADDING_BLOCK
                tables.append([pool.take(source) for _ in range(count)])
                if found:
                    copies.append(BlockCopy(group, source, tables[-1][0]))
                continue
            source = pool.checkpoint_of(source_key) if common else PADDING_BLOCK
            pool.own(blocks)
            hidden = [PADDING_BLOCK] * (found - len(blocks))
            tables.append(hidden + blocks + [pool.take() for _ in range(count)])
            if common and tables[-1][found] != source:
                # If the source was evicted for other blocks of the sequence, it is copied before these are written.
                copies.append(BlockCopy(group, source, tables[-1][found]))
        cached = start + common
        return Allocation(tuple(tables), cached, tuple(copies), max(cached, held * BLOCK_SIZE))

    def _beginning_of(self, before: bytes, tokens: Seq[int]) -> tuple[bytes, int]:
        """Finds the cached block after the one with key `before` that begins with the most of `tokens`. Returns its key
        and the number of these tokens, or (b"", 0) if no block is worth a copy."""
        best, most = b"", 0
        if len(tokens) >= LEAST_COPIED and not self._states:
            for known in filter(self._is_cached, self._beginnings.get(before, ())):
                if (common := _alike(known.tokens, tokens)) > most:
                    best, most = known.key, min(common, BLOCK_SIZE - 1)
        return (best, most) if most >= LEAST_COPIED else (b"", 0)

    def _is_cached(self, beginning: _Beginning) -> bool:
        return all(beginning.key in pool.by_key for pool in self._paged)

    def keep_beginning(self, tables: Seq[Seq[int]], keys: Seq[bytes], tokens: Seq[int]) -> None:
        """Registers the last, partly filled block of a sequence that ends, by its `tokens`. `keys`: the keys of the
        full blocks before it."""
        index = len(keys)
        if (
            self._states
            or len(tokens) < LEAST_COPIED
            or any(table[index] == PADDING_BLOCK for table in tables)
        ):
            return
        before = keys[-1] if keys else b""
        key = _key(before, tokens)
        for pool, table in zip(self._pools, tables, strict=True):
            pool.name(table[index], key)
        self._note_beginning(before, key, tokens)

    def _note_beginning(self, before: bytes, key: bytes, tokens: Seq[int]) -> None:
        if len(self._beginnings) > 2 * sum(len(pool.by_key) for pool in self._paged) + _FEW:
            kept = {each: list(filter(self._is_cached, known)) for each, known in self._beginnings.items()}
            self._beginnings = {each: known for each, known in kept.items() if known}
        others = [
            known
            for known in self._beginnings.get(before, ())
            if self._is_cached(known) and _alike(known.tokens, tokens) < len(known.tokens)
        ]
        self._beginnings[before] = [_Beginning(key, array("q", tokens)), *others[: _MOST_BEGINNINGS - 1]]

    @property
    def rewinds(self) -> int:
        """Positions by which all states can be rolled back."""
        return min((pool.shape.rewinds for pool in self._states), default=0)

    def checkpoint(self, tables: Seq[Seq[int]], key: bytes, on_the_way: bool = False) -> list[BlockCopy]:
        """Registers a checkpoint of a sequence's states at the end of the block with this key. Returns the copies that
        make it, due before the next step.

        Least recently used checkpoints make room; a group without a free block gets none. `on_the_way`: this one is
        evicted before others until it has been used.
        """
        copies = []
        for group, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            if pool.shape.is_state and not pool.holds(key) and pool.num_free:
                copies.append(BlockCopy(group, table[0], pool.keep_new(key, on_the_way)))
        return copies

    def take_checkpoint(self, key: bytes) -> list[int]:
        """Takes blocks for the checkpoint at the end of the block with this key, which the next step writes. Returns
        one block per group, 0 for groups without a state; an empty list if the key is known or no block is free.

        The caller owns the blocks until `give_checkpoint`. Least recently used checkpoints make room.
        """
        if any(pool.holds(key) or not pool.num_free for pool in self._states):
            return []
        return [pool.take() if pool.shape.is_state else PADDING_BLOCK for pool in self._pools]

    def give_checkpoint(self, blocks: Seq[int], key: bytes | None = None, on_the_way: bool = False) -> None:
        """Gives back blocks of `take_checkpoint`: with a key as a checkpoint, without one as empty. `on_the_way`: see
        `checkpoint`."""
        for pool, number in zip(self._pools, blocks, strict=True):
            if pool.shape.is_state:
                pool.keep(number, key, on_the_way)

    def spares(self, tables: Seq[Seq[int]]) -> list[BlockCopy]:
        """The copies that restore a sequence's states to those before its draft; empty if no pool has spares
        (`CachePool.spares`)."""
        return [
            BlockCopy(group, table[1], table[0])
            for group, (pool, table) in enumerate(zip(self._pools, tables, strict=True))
            if pool.shape.spares
        ]

    def add_copies(self, tables: Seq[list[int]]) -> bool:
        """Appends a block to each of a sequence's tables of states, for copies at the ends of full blocks. False if
        they have one, or if such blocks take half of the room for checkpoints."""
        if self.has_copies(tables) or any(
            2 * self._kept_copies >= pool.shape.checkpoints or not pool.num_free for pool in self._states
        ):
            return False
        self._kept_copies += 1
        for pool, table in zip(self._pools, tables, strict=True):
            if pool.shape.is_state:
                table.append(pool.take())
        return True

    def has_copies(self, tables: Seq[Seq[int]]) -> bool:
        """Whether a sequence has the blocks of `add_copies`."""
        return any(
            pool.shape.is_state and len(table) > 1 + pool.shape.spares
            for pool, table in zip(self._pools, tables, strict=True)
        )

    def name_copies(self, tables: Seq[Seq[int]], key: bytes) -> None:
        """Names the blocks of `add_copies` by this key: they are a checkpoint once the sequence has released them."""
        for pool, table in zip(self._pools, tables, strict=True):
            if pool.shape.is_state:
                pool.name(table[-1], key)

    def grow(self, tables: Seq[list[int]], start: int, positions: int) -> bool:
        """Appends blocks until the tables cover `positions`, for a step that begins at position `start`.

        In a group with a window, blocks that no position from `start` on attends to are released, and the table covers
        as much as the step needs. Returns False, with no block appended, if too few blocks are free.
        """
        for pool, table in zip(self._pools, tables, strict=True):
            if pool.shape.window is not None:
                pool.release_hidden(table, start)
        # Nearly every step ends here.
        if self.covered(tables) >= positions:
            return True
        ends = [pool.end(start, positions) for pool in self._pools]
        missing = [max(0, end - len(table)) for end, table in zip(ends, tables, strict=True)]
        if any(count > pool.num_free for pool, count in zip(self._pools, missing, strict=True)):
            return False
        for pool, table, count in zip(self._pools, tables, missing, strict=True):
            table += [pool.take() for _ in range(count)]
        return True

    def computed(self, tables: Seq[Seq[int]], keys: Seq[bytes], first: int, tokens: Seq[int] = ()) -> None:
        """Registers the full blocks `first`, ... of these tables under their keys, so that others can share them, and,
        with the sequence's `tokens`, copy their beginnings."""
        for index in range(first, len(keys)) if tokens and not self._states else ():
            own = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            self._note_beginning(keys[index - 1] if index else b"", keys[index], own)
        for pool, table in zip(self._pools, tables, strict=True):
            if pool.shape.is_state:  # states change with every step: see `checkpoint`
                continue
            for number, key in zip(table[first:], keys[first:], strict=False):
                pool.name(number, key)

    def free(self, tables: Seq[Seq[int]]) -> None:
        """Release all blocks of a sequence. Its end is evicted before its beginning."""
        self._kept_copies -= bool(tables) and self.has_copies(tables)
        for pool, table in zip(self._pools, tables, strict=True):
            pool.release(number for number in reversed(table) if number != PADDING_BLOCK)

    def held(self, keys: Seq[bytes]) -> list[dict[int, int]]:
        """For each cache group, the blocks of the longest prefix of `keys` that all groups hold, by index.

        A group with a window or a state lists only the blocks that are still cached. A checkpoint in host memory is
        copied to a free block of the device, if there is one.
        """
        if end := _match(self._pools, keys):
            self._bring_back(keys[end - 1])
        prefix = keys[: _match(self._pools, keys, on_device=True)]
        return [
            {
                index: pool.by_key[key]
                for index, key in enumerate(prefix)
                if key in pool.by_key and (not pool.shape.is_state or index == len(prefix) - 1)
            }
            for pool in self._pools
        ]

    def _bring_back(self, key: bytes) -> None:
        """Copies the checkpoint with this key from host memory to free blocks of the device."""
        for group, pool in enumerate(self._pools):
            if pool.shape.is_state and key not in pool.by_key and pool.num_free:
                source = pool.checkpoint_of(key)
                number = pool.take(source)
                self._copy_blocks([BlockCopy(group, source, number)])
                pool.keep(number, key, evicted_first=False)

    def take_back(self, keys: Seq[bytes], held: Seq[Seq[int]]) -> list[dict[int, int]] | None:
        """Allocates blocks for saved contents; the caller owns them, fills them, and then calls `given_back`.

        `held`: for each cache group the indices of the saved blocks. Returns the new blocks of each group by index. A
        saved block that is cached already gets none. Where room is short, a saved block that no token after the prefix
        sees gets none either. Returns None, with no block allocated, if the remaining ones do not fit.
        """
        taken: list[dict[int, int]] = []
        for pool, indices in zip(self._pools, held, strict=True):
            first = pool.shape.first_visible(len(keys) * BLOCK_SIZE)
            pool.own(present := [pool.by_key[keys[index]] for index in indices if keys[index] in pool.by_key])
            missing = [index for index in sorted(indices, reverse=True) if keys[index] not in pool.by_key]
            short = sum(index >= first for index in missing) > pool.num_free
            blocks = {} if short else {index: pool.take() for index in missing[: pool.num_free]}
            pool.release(reversed(present))
            taken.append(blocks)
            if short:
                for owner, owned in zip(self._pools, taken, strict=False):
                    owner.release(owned.values())
                return None
        return taken

    def given_back(self, keys: Seq[bytes], taken: Seq[Mapping[int, int]]) -> None:
        """Registers the filled blocks of `take_back` under their keys, and frees them."""
        for pool, blocks in zip(self._pools, taken, strict=True):
            for index, number in blocks.items():  # from the end on, which is evicted first
                pool.name(number, keys[index])
                pool.release([number])

    def discard(self, keys: Seq[bytes], tokens: Seq[int] = ()) -> None:
        """Removes the blocks with these keys from the prefix cache. `tokens`: the tokens of which these are the keys;
        if given, blocks registered by some of the first tokens, or of those after one of the keys, are removed, too."""
        removed = [*keys]
        for index, before in enumerate((b"", *keys) if tokens else ()):
            own = tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]
            known = self._beginnings.get(before, ())
            removed += [each.key for each in known if _alike(each.tokens, own) == len(each.tokens)]
        for pool in self._pools:
            for key in removed:
                pool.unname(key)

    def reset(self) -> None:
        """Empties the prefix cache: the content of all free blocks is invalid."""
        self._beginnings.clear()
        for pool in self._pools:
            pool.reset()


def _alike(some: Seq[int], others: Seq[int]) -> int:
    """The number of equal tokens at the beginning of two texts."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((index for index, (one, other) in pairs if one != other), min(len(some), len(others)))


def _match(pools: Seq[BlockPool], keys: Seq[bytes], on_device: bool = False) -> int:
    """The length in full blocks of the longest prefix for which each of these groups holds what the next token sees.
    `on_device`: checkpoints in host memory do not count."""
    longest = 0
    held_from = [0] * len(pools)  # index from which on all blocks were found
    for index, key in enumerate(keys):
        for group, pool in enumerate(pools):
            if key not in pool.by_key and (on_device or key not in pool.cold):
                held_from[group] = index + 1
                if pool.shape.window is None and not pool.shape.is_state:
                    return longest
        behind = (index + 1) * BLOCK_SIZE
        if all(
            first <= (index if pool.shape.is_state else pool.shape.first_visible(behind))
            for pool, first in zip(pools, held_from, strict=True)
        ):
            longest = index + 1
    return longest
