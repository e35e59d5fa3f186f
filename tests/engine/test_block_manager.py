"""The block manager against a model of plain lists: no block lost, freed twice, or shared where texts differ."""

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from quengine.block_manager import BlockManager

SIZE = 2
BLOCKS = 8

tokens = st.integers(0, 1)
texts = st.lists(tokens, min_size=1, max_size=14) | st.integers(1, 14).map(lambda n: [0] * n)


@dataclass
class Text:
    ids: list[int]
    table: list[int]
    computed: int

    def prefix(self, index: int) -> tuple[int, ...]:
        return tuple(self.ids[: (index + 1) * SIZE])


class Blocks(RuleBasedStateMachine):
    """What every block holds, in full, is noted beside it: its text from the beginning on."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS, SIZE)
        self.live: list[Text] = []
        self.holds: dict[int, tuple[int, ...]] = {}  # full blocks that can be found, by number
        self.unused: list[int] = []  # those of them that are free, the longest unused first
        self.twice = (
            False  # contents were held twice, or forgotten: from then on not everything held is found
        )

    held = Bundle("held")

    def owned(self) -> set[int]:
        return {block for text in self.live for block in text.table}

    def findable(self, ids: list[int]) -> list[int]:
        blocks = {prefix: block for block, prefix in self.holds.items()}
        found = []
        for end in range(SIZE, len(ids) + 1, SIZE):
            if tuple(ids[:end]) not in blocks:
                break
            found.append(blocks[tuple(ids[:end])])
        return found

    def handed_out(self, new: list[int], owned: set[int]) -> None:
        """Blocks that were taken: free ones, empty before those with content, the longest unused first."""
        assert len(set(new)) == len(new) and not owned & set(new)
        empty = BLOCKS - len(owned) - len(self.unused)
        evicted = [block for block in new if block in self.holds]
        assert evicted == self.unused[: max(0, len(new) - empty)]
        for block in evicted:
            self.unused.remove(block)
            del self.holds[block]

    @rule(target=held, ids=texts, reserve=st.integers(0, 2))
    def allocate(self, ids: list[int], reserve: int) -> Text | None:
        owned = self.owned()
        found = self.findable(ids[:-1])
        allocation = self.manager.allocate(ids[:-1], len(ids), reserve)
        needed = -(-len(ids) // SIZE) - len(found)
        room = BLOCKS - len(owned | set(found))
        if allocation is None:
            assert self.twice or needed + reserve > room
            return None
        shared = allocation.num_cached_tokens // SIZE
        assert allocation.block_table[:shared] == found[:shared]
        assert self.twice or shared == len(found)
        assert needed + reserve <= room
        text = Text(list(ids), allocation.block_table, allocation.num_cached_tokens)
        self.unused = [block for block in self.unused if block not in text.table[:shared]]
        self.handed_out(text.table[shared:], owned | set(text.table[:shared]))
        assert len(text.table) == -(-len(ids) // SIZE)
        self.live.append(text)
        return text

    @rule(text=held, count=st.integers(1, 14))
    def compute(self, text: Text | None, count: int) -> None:
        if text not in self.live or text is None:
            return
        text.computed = min(len(text.ids), text.computed + count)
        self.manager.computed(text.table, text.ids[: text.computed])
        for index in range(text.computed // SIZE):
            block, prefix = text.table[index], text.prefix(index)
            if self.holds.get(block) == prefix:
                continue
            if prefix in self.holds.values():
                self.twice = True
            elif not self.twice or self.manager._blocks[block].key is not None:
                self.holds[block] = prefix

    @rule(text=held, ids=st.lists(tokens, min_size=1, max_size=5))
    def grow(self, text: Text | None, ids: list[int]) -> None:
        if text not in self.live or text is None:
            return
        owned = self.owned()
        before = list(text.table)
        if not self.manager.grow(text.table, len(text.ids) + len(ids)):
            assert text.table == before
            assert -(-(len(text.ids) + len(ids)) // SIZE) - len(before) > BLOCKS - len(owned)
            return
        text.ids += ids
        assert text.table[: len(before)] == before and len(text.table) == -(-len(text.ids) // SIZE)
        self.handed_out(text.table[len(before) :], owned)

    @rule(text=consumes(held))
    def free(self, text: Text | None) -> None:
        if text not in self.live or text is None:
            return
        self.live = [other for other in self.live if other is not text]
        self.manager.free(text.table)
        still = self.owned()
        self.unused += [b for b in reversed(text.table) if b in self.holds and b not in still]

    @rule(text=consumes(held))
    def discard(self, text: Text | None) -> None:
        """As `free`, but what it held is not found any more, nor what lies behind it."""
        if text not in self.live or text is None:
            return
        self.live = [other for other in self.live if other is not text]
        self.manager.discard(text.table)
        self.manager.free(text.table)
        forgotten = [block for block in text.table if self.holds.pop(block, None) is not None]
        self.twice |= bool(forgotten)

    @rule()
    def forget(self) -> None:
        self.manager.forget()
        for block in self.unused:
            del self.holds[block]
        self.unused.clear()

    @invariant()
    def no_block_is_lost(self) -> None:
        assert self.manager.num_used == len(self.owned())
        assert self.manager.num_free == BLOCKS - len(self.owned())

    @invariant()
    def what_is_shared_is_equal_from_the_beginning_and_computed(self) -> None:
        first: dict[int, tuple[int, Text]] = {}
        for text in self.live:
            for index, block in enumerate(text.table):
                at, other = first.setdefault(block, (index, text))
                if other is not text:
                    assert at == index and other.prefix(index) == text.prefix(index)
                    assert max(other.computed, text.computed) >= (index + 1) * SIZE

    def teardown(self) -> None:
        for text in self.live:
            self.manager.free(text.table)
        assert self.manager.num_free == BLOCKS


TestBlocks = Blocks.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, derandomize=True)


def computed(manager: BlockManager, ids: list[int]) -> list[int]:
    allocation = manager.allocate(ids, len(ids))
    assert allocation is not None
    manager.computed(allocation.block_table, ids)
    return allocation.block_table


def test_full_blocks_of_an_equal_beginning_are_shared_while_they_are_owned() -> None:
    manager = BlockManager(8, 4)
    first = computed(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    other = manager.allocate([1, 2, 3, 4, 5, 6, 7, 8, 10], 9)
    assert other is not None and other.num_cached_tokens == 8
    assert other.block_table[:2] == first[:2] and other.block_table[2] != first[2]
    assert manager.num_used == 4


def test_an_equal_block_behind_another_beginning_is_not_shared() -> None:
    manager = BlockManager(8, 4)
    computed(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    other = manager.allocate([9, 9, 9, 9, 5, 6, 7, 8], 8)
    assert other is not None and other.num_cached_tokens == 0


def test_contents_with_equal_hashes_are_told_apart() -> None:
    assert hash(-1) == hash(-2)
    manager = BlockManager(8, 2)
    computed(manager, [-1, -1])
    other = manager.allocate([-2, -2], 2)
    assert other is not None and other.num_cached_tokens == 0


def test_a_freed_text_is_found_again_until_its_blocks_are_needed_its_end_first() -> None:
    manager = BlockManager(3, 2)
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6]))
    assert manager.num_free == 3
    again = manager.allocate([1, 2, 3, 4, 5, 6], 6)
    assert again is not None and again.num_cached_tokens == 6
    manager.free(again.block_table)
    manager.free(computed(manager, [7, 7]))
    again = manager.allocate([1, 2, 3, 4, 5, 6], 6)
    assert again is not None and again.num_cached_tokens == 4


def test_free_blocks_that_would_be_shared_do_not_count_as_room_for_others() -> None:
    manager = BlockManager(4, 2)
    manager.free(computed(manager, [1, 2, 3, 4, 5, 6]))
    assert manager.allocate([1, 2, 3, 4, 5, 6], 10) is None
    assert manager.num_free == 4
    again = manager.allocate([1, 2, 3, 4, 5, 6], 8)
    assert again is not None and again.num_cached_tokens == 6 and manager.num_free == 0


def test_a_block_freed_twice_is_found_out() -> None:
    manager = BlockManager(2, 2)
    table = computed(manager, [1])
    manager.free(table)
    with pytest.raises(AssertionError, match="has no owner"):
        manager.free(table)
