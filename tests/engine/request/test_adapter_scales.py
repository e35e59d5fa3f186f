"""Keys of blocks that adapters computed."""

from quengine.block_manager import extend_keys
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.request.adapter_scales import Scales, keyed

IDS = list(range(7, 7 + 2 * BLOCK_SIZE))


def keys(ids: list[int], scales: Scales | None) -> list[bytes]:
    found = list[bytes]()
    extend_keys(found, keyed(ids, scales))
    return found


def test_every_block_is_told_apart_by_scales_and_tokens() -> None:
    each = [(1.0, 0.0), (0.0, 1.0), (1.0,), (1.0, 1e-300)]
    found = [key for scales in (None, *each) for key in keys(IDS, scales)]
    assert len(set(found)) == len(found) == 2 * 5
    assert keys(IDS, (1.0,)) == keys(list(IDS), (1.0,))
    for place in (0, BLOCK_SIZE):
        other = [*IDS[:place], IDS[place] + 1, *IDS[place + 1 :]]
        assert keys(other, (1.0,))[1] != keys(IDS, (1.0,))[1]


def test_ids_stay_where_no_adapter_is_applied() -> None:
    assert keyed(IDS, None) is IDS and keyed(IDS, (0.0, -0.0)) is IDS and keyed([], (1.0,)) == []


def test_the_first_id_is_no_token_and_the_others_stay() -> None:
    first, *others = keyed(IDS, (0.5,))
    assert -(1 << 63) <= first < 0 and others == IDS[1:]
    image = keyed([-(1 << 63), 4], (0.5,))  # the first position may be an image's
    assert -(1 << 63) <= image[0] < 0 and image[1] == 4
