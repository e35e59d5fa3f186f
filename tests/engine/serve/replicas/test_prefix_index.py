"""What a replica's cache probably holds: the longest prefix, and what is left out first."""

from quengine.block_manager import extend_keys
from quengine.serve.replicas.prefix_index import PrefixIndex


def keys_of(tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens)
    return keys


def test_the_longest_prefix_is_found_and_nothing_behind_a_gap() -> None:
    index, keys = PrefixIndex(), keys_of(list(range(32 * 6)))
    assert index.known(keys) == 0
    index.add(keys[:3])
    index.add(keys[4:])
    assert index.known(keys) == 3 and index.known(keys[:2]) == 2 and len(index) == 5
    assert index.known(keys_of([9, *range(1, 64)])) == 0
    index.discard(keys[1:2])
    assert index.known(keys) == 1
    index.clear()
    assert index.known(keys) == len(index) == 0


def test_the_least_recently_used_go_first_and_an_end_before_its_beginning() -> None:
    first, second = keys_of(list(range(32 * 4))), keys_of(list(range(100, 100 + 32 * 3)))
    index = PrefixIndex(6)
    index.add(first)
    index.add(second)
    assert len(index) == 6
    assert (index.known(first), index.known(second)) == (3, 3)
    index.add(first)  # used again: the other's end goes
    assert (index.known(first), index.known(second)) == (4, 2)
