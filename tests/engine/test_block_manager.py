"""The block manager against a model of plain lists and of what a cache's rows hold: no block lost, freed twice, shared
where texts differ, or handed out while a token to come still sees it."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from quengine.block_manager import Allocation, BlockManager, extend_keys
from quengine.block_pool import CachePool
from quengine.kernels.kv.cache_types import BLOCK_SIZE, PADDING_BLOCK, blocks_for

CHUNK = 32
POOLS = (CachePool(10), CachePool(8, window=40, chunk=CHUNK))

letters = st.lists(st.integers(0, 1), min_size=1, max_size=7) | st.integers(1, 7).map(lambda n: [0] * n)


def expanded(blocks: list[int]) -> list[int]:
    return [letter for letter in blocks for _ in range(BLOCK_SIZE)]


def keys_of(ids: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, ids)
    return keys


@dataclass(eq=False)
class Text:
    ids: list[int]
    tables: tuple[list[int], ...]
    computed: int


@dataclass
class Held:
    """What a group's blocks hold: the text up to each row, and up to their end where they are full and can be found."""

    shape: CachePool
    rows: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    full: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unused: list[int] = field(
        default_factory=list
    )  # full blocks that are free, the least recently used first

    def taken(self, new: list[int], owned: set[int]) -> None:
        """Free blocks were handed out, those that hold nothing before others, the least recently used first."""
        assert len(set(new)) == len(new) and not owned & set(new) and PADDING_BLOCK not in new
        empty = self.shape.num_blocks - len(owned) - len(self.unused)
        evicted = [block for block in new if block in self.full]
        assert evicted == self.unused[: max(0, len(new) - empty)]
        self.unused = [block for block in self.unused if block not in evicted]
        for block in evicted:
            del self.full[block]

    def released(self, blocks: Iterable[int], owned: set[int]) -> None:
        self.unused += [block for block in blocks if block in self.full and block not in owned]


class Blocks(RuleBasedStateMachine):
    """Texts come, are computed in steps, grow and go, over a group that keeps all positions and one with a window."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(POOLS)
        self.live: list[Text] = []
        self.groups = [Held(shape) for shape in POOLS]

    held = Bundle("held")

    def owned(self, group: int) -> set[int]:
        return {block for text in self.live for block in text.tables[group]} - {PADDING_BLOCK}

    def longest_prefix(self, ids: list[int]) -> int:
        """Full blocks of the longest prefix of which each group holds what the next token sees."""
        for count in range(len(ids) // BLOCK_SIZE, 0, -1):
            needed = [range(held.shape.first_visible(count * BLOCK_SIZE), count) for held in self.groups]
            if all(
                tuple(ids[: (index + 1) * BLOCK_SIZE]) in held.full.values()
                for held, indices in zip(self.groups, needed, strict=True)
                for index in indices
            ):
                return count
        return 0

    @rule(target=held, blocks=letters, cut=st.sampled_from([0, 0, 0, 7]), reserve=st.integers(0, 2))
    def allocate(self, blocks: list[int], cut: int, reserve: int) -> Text | None:
        ids = expanded(blocks)[cut:]
        owned = [self.owned(group) for group in range(2)]
        found = self.longest_prefix(ids[:-1])
        allocation = self.manager.allocate(keys_of(ids[:-1]), len(ids), reserve)
        if allocation is None:
            assert any(
                min(blocks_for(len(ids)) - found, held.shape.most_blocks(len(ids))) + reserve
                > held.shape.num_blocks - len(mine) - found
                for held, mine in zip(self.groups, owned, strict=True)
            )
            return None
        assert allocation.num_cached_tokens == found * BLOCK_SIZE
        for held, table, mine in zip(self.groups, allocation.block_tables, owned, strict=True):
            first = held.shape.first_visible(found * BLOCK_SIZE)
            assert table[:first] == [PADDING_BLOCK] * first
            for index in range(first, found):
                assert held.full[table[index]] == tuple(ids[: (index + 1) * BLOCK_SIZE])
            shared = set(table[first:found])
            held.unused = [block for block in held.unused if block not in shared]
            held.taken(table[found:], mine | shared)
            assert held.shape.num_blocks - len(mine | set(table[first:])) >= reserve
        self.live.append(Text(ids, allocation.block_tables, found * BLOCK_SIZE))
        return self.live[-1]

    @rule(text=held, count=st.sampled_from([1, CHUNK - 1, CHUNK]), drafted=st.integers(0, 40))
    def step(self, text: Text | None, count: int, drafted: int) -> None:
        """Compute some of a text's tokens, and others behind them that the text does not take."""
        if text not in self.live or text is None or text.computed == len(text.ids):
            return
        before, owned = [list(table) for table in text.tables], [self.owned(group) for group in range(2)]
        grown = self.manager.grow(text.tables, text.computed, len(text.ids) + drafted)
        for group, (held, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            first, length = held.shape.first_visible(text.computed), len(before[group])
            assert table[:first] == [PADDING_BLOCK] * first and table[first:length] == before[group][first:]
            hidden = [block for block in before[group][:first] if block != PADDING_BLOCK]
            held.released(hidden, still := self.owned(group) - set(table[length:]))
            held.taken(table[length:], still)
            assert owned[group] >= still and len(table) - first <= held.shape.most_blocks(10**6)
            assert grown or table[first:] == before[group][first:]
        covered = min(map(len, text.tables)) * BLOCK_SIZE
        end = min(text.computed + count, len(text.ids), covered)
        wrong = [2] * min(drafted, covered - end, POOLS[1].chunk - (end - text.computed))
        self.compute(text, [*text.ids[:end], *wrong])
        keys = keys_of(text.ids[:end])
        self.manager.computed(text.tables, keys, text.computed // BLOCK_SIZE)
        for held, table in zip(self.groups, text.tables, strict=True):
            for index in range(text.computed // BLOCK_SIZE, end // BLOCK_SIZE):
                prefix = tuple(text.ids[: (index + 1) * BLOCK_SIZE])
                if prefix not in held.full.values():
                    held.full[table[index]] = prefix
        text.computed = end

    @rule(text=held)
    def finish(self, text: Text | None) -> None:
        """Compute all of a text's tokens, as far as there are blocks."""
        while text is not None and text in self.live and text.computed < len(text.ids):
            before = text.computed
            self.step(text, CHUNK, 0)
            if text.computed == before:
                break

    def compute(self, text: Text, ids: list[int]) -> None:
        """Each token finds what it sees of the tokens before it, whatever other texts have written meanwhile."""
        for held, table in zip(self.groups, text.tables, strict=True):
            for position in range(text.computed, len(ids)):
                block = table[position // BLOCK_SIZE]
                assert (
                    block != PADDING_BLOCK
                    and sum(block in t.tables[self.groups.index(held)] for t in self.live) == 1
                )
                held.rows[block, position % BLOCK_SIZE] = tuple(ids[: position + 1])
            first = max(0, text.computed + 1 - (held.shape.window or len(ids)))
            for position in range(first, len(ids)):
                block = table[position // BLOCK_SIZE]
                assert held.rows[block, position % BLOCK_SIZE] == tuple(ids[: position + 1])

    @rule(text=held, ids=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    def append(self, text: Text | None, ids: list[int]) -> None:
        if text in self.live and text is not None and len(text.ids) < 400:
            text.ids += ids

    @rule(text=consumes(held))
    def free(self, text: Text | None) -> None:
        if text not in self.live or text is None:
            return
        self.live.remove(text)
        self.manager.free(text.tables)
        for group, (held, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            held.released(reversed(table), self.owned(group))

    @rule(text=consumes(held))
    def discard(self, text: Text | None) -> None:
        """As `free`, but what it held is not found any more, also of blocks that were released before."""
        if text not in self.live or text is None:
            return
        self.live.remove(text)
        self.manager.discard(keys_of(text.ids))
        self.manager.free(text.tables)
        prefixes = {tuple(text.ids[: end + BLOCK_SIZE]) for end in range(0, len(text.ids), BLOCK_SIZE)}
        for group, (held, table) in enumerate(zip(self.groups, text.tables, strict=True)):
            held.full = {block: prefix for block, prefix in held.full.items() if prefix not in prefixes}
            held.unused = [block for block in held.unused if block in held.full]
            held.released(reversed(table), self.owned(group))

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        for held in self.groups:
            for block in held.unused:
                del held.full[block]
            held.unused.clear()

    @invariant()
    def no_block_is_lost(self) -> None:
        owned = [len(self.owned(group)) for group in range(2)]
        assert self.manager.num_used == max(owned)
        assert self.manager.num_free == min(
            shape.num_blocks - count for shape, count in zip(POOLS, owned, strict=True)
        )

    @invariant()
    def what_is_shared_is_equal_from_the_beginning_and_computed(self) -> None:
        for group in range(2):
            first: dict[int, tuple[int, Text]] = {}
            for text in self.live:
                for index, block in enumerate(text.tables[group]):
                    if block == PADDING_BLOCK:
                        continue
                    at, other = first.setdefault(block, (index, text))
                    if other is not text:
                        end = (index + 1) * BLOCK_SIZE
                        assert at == index and other.ids[:end] == text.ids[:end]
                        assert max(other.computed, text.computed) >= end

    def teardown(self) -> None:
        for text in self.live:
            self.manager.free(text.tables)
        assert self.manager.num_used == 0


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def manager_of(*pools: CachePool) -> BlockManager:
    return BlockManager(pools)


def allocated(manager: BlockManager, blocks: list[int], more: int = 0) -> Allocation | None:
    ids = expanded(blocks)
    return manager.allocate(keys_of(ids), len(ids) + more)


def computed(manager: BlockManager, blocks: list[int], more: int = 0) -> tuple[list[int], ...]:
    """Tables of a text whose blocks were computed one by one."""
    ids = expanded(blocks)
    allocation = manager.allocate([], len(ids) + more)
    assert allocation is not None
    for index in range(len(blocks)):
        assert manager.grow(allocation.block_tables, index * BLOCK_SIZE, len(ids) + more)
        manager.computed(allocation.block_tables, keys_of(ids[: (index + 1) * BLOCK_SIZE]), index)
    return allocation.block_tables


def test_full_blocks_of_an_equal_beginning_are_shared_while_they_are_owned() -> None:
    manager = manager_of(CachePool(8))
    (first,) = computed(manager, [1, 2], more=1)
    other = allocated(manager, [1, 2], more=1)
    assert other is not None and other.num_cached_tokens == 64
    (table,) = other.block_tables
    assert table[:2] == first[:2] and table[2] != first[2]
    assert manager.num_used == 4


def test_an_equal_block_behind_another_beginning_is_not_shared() -> None:
    manager = manager_of(CachePool(8))
    computed(manager, [1, 2])
    other = allocated(manager, [9, 2])
    assert other is not None and other.num_cached_tokens == 0


def test_contents_with_equal_hashes_are_told_apart() -> None:
    assert hash(-1) == hash(-2)
    manager = manager_of(CachePool(8))
    computed(manager, [-1])
    other = allocated(manager, [-2])
    assert other is not None and other.num_cached_tokens == 0


def test_a_freed_text_is_found_again_until_its_blocks_are_needed_its_end_first() -> None:
    manager = manager_of(CachePool(3))
    manager.free(computed(manager, [1, 2, 3]))
    assert manager.num_free == 3
    again = allocated(manager, [1, 2, 3])
    assert again is not None and again.num_cached_tokens == 96
    manager.free(again.block_tables)
    manager.free(computed(manager, [7]))
    again = allocated(manager, [1, 2, 3])
    assert again is not None and again.num_cached_tokens == 64


def test_free_blocks_that_would_be_shared_do_not_count_as_room_for_others() -> None:
    manager = manager_of(CachePool(4))
    manager.free(computed(manager, [1, 2, 3]))
    assert allocated(manager, [1, 2, 3], more=64) is None
    assert manager.num_free == 4
    again = allocated(manager, [1, 2, 3], more=32)
    assert again is not None and again.num_cached_tokens == 96 and manager.num_free == 0


def test_a_block_freed_twice_is_found_out() -> None:
    manager = manager_of(CachePool(2))
    tables = computed(manager, [], more=1)
    manager.free(tables)
    with pytest.raises(AssertionError, match="has no owner"):
        manager.free(tables)


def test_blocks_behind_the_window_are_released_and_found_until_they_are_needed() -> None:
    manager = manager_of(CachePool(20), CachePool(6, window=64, chunk=32))
    every, windowed = tables = computed(manager, list(range(9)), more=1)
    assert PADDING_BLOCK not in every and windowed[:6] == [PADDING_BLOCK] * 6
    assert len(windowed) == 10 and manager.num_used == 10
    again = allocated(manager, list(range(9)))
    assert again is not None and again.num_cached_tokens == 9 * BLOCK_SIZE
    assert again.block_tables[1][:7] == [PADDING_BLOCK] * 7 and again.block_tables[1][7:] == windowed[7:9]
    manager.free(again.block_tables)
    manager.free(tables)
    # Of a shorter prefix the window's blocks were needed for what followed.
    assert (shorter := allocated(manager, [0, 1, 2])) is not None and shorter.num_cached_tokens == 0


def test_a_prefix_is_as_long_as_all_groups_hold_it() -> None:
    manager = manager_of(CachePool(20), CachePool(20, window=32, chunk=32))
    manager.free(computed(manager, [1, 2, 3, 4]))
    manager._pools[1].unname(keys_of(expanded([1, 2, 3, 4]))[3])
    found = allocated(manager, [1, 2, 3, 4])
    assert found is not None and found.num_cached_tokens == 96
    assert found.block_tables[1][:2] == [PADDING_BLOCK] * 2 and PADDING_BLOCK not in found.block_tables[1][2:]
    manager._pools[0].unname(keys_of(expanded([1, 2]))[1])
    found = allocated(manager, [1, 2, 3, 4])
    assert found is not None and found.num_cached_tokens == 32


@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100])
@pytest.mark.parametrize("chunk", [1, 16, 32, 50])
def test_a_pool_of_one_sequences_blocks_is_enough_for_every_position(window: int, chunk: int) -> None:
    shape = CachePool(0, window, chunk)
    pool = CachePool(shape.most_blocks(2000), window, chunk)
    manager = manager_of(pool)
    allocation = manager.allocate([], 2000)
    assert allocation is not None and pool.num_blocks <= blocks_for(window + chunk) + 1
    for start in range(0, 2000 - chunk, chunk):
        assert manager.grow(allocation.block_tables, start, 2000)
        (table,) = allocation.block_tables
        assert len(table) * BLOCK_SIZE > min(start + chunk, 1999)
        seen = table[max(0, start - window + 1) // BLOCK_SIZE : (start + chunk) // BLOCK_SIZE + 1]
        assert PADDING_BLOCK not in seen and len(set(seen)) == len(seen)


def test_saved_blocks_are_taken_back_into_free_ones_and_found_again() -> None:
    manager = BlockManager((CachePool(4), CachePool(3, window=40, chunk=CHUNK)))
    keys = keys_of(expanded([1, 2, 3, 4]))
    every = [range(4), range(4)]
    taken = manager.take_back(keys, every)
    # Of the group with a window what its end sees, 2 and 3, and what else there is room for.
    assert taken is not None and [list(blocks) for blocks in taken] == [[3, 2, 1, 0], [3, 2, 1]]
    assert manager.num_free == 0
    manager.given_back(keys, taken)
    assert manager.num_free == 3 and [dict(sorted(held.items())) for held in manager.held(keys)] == [
        dict(sorted(blocks.items())) for blocks in taken
    ]
    assert manager.take_back(keys, every) == [{}, {}]
    allocation = manager.allocate(keys, 4 * BLOCK_SIZE)
    assert allocation is not None and allocation.num_cached_tokens == 4 * BLOCK_SIZE
    manager.free(allocation.block_tables)
    other = manager.allocate([], 2 * BLOCK_SIZE)
    assert other is not None
    free = manager.num_free
    assert manager.take_back(keys_of(expanded([9, 9, 9, 9])), every) is None and manager.num_free == free
    manager.free(other.block_tables)
    assert manager.num_free == 3
