"""CPU attention of one token over caches of every type, against fp64."""

import pytest
import torch
from torch import Tensor

from quengine.kernels.attention import attention
from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu import set_threads
from quengine.kernels.cpu.runtime.threads import max_threads
from quengine.kernels.forward_batch import decode_batch
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, write_rows
from tests.kernels.cpu.cpu_runs import attend_token, batch_attention
from tests.kernels.weights import nmse

MANY = max_threads()
SHAPES = [  # heads, kv_heads, head_dim, length, first
    (9, 3, 64, 1, 0),
    (9, 3, 64, 77, 0),
    (4, 1, 128, 700, 0),
    (6, 2, 80, 519, 100),
    (4, 4, 20, 258, 1),
    (2, 1, 7, 300, 0),
    (4, 2, 96, 300, 0),
    (4, 1, 256, 300, 33),
    (4, 1, 512, 270, 3),
]


def random_cache(ctx: int, kv_heads: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(ctx)
    k, v = (torch.randn(ctx, kv_heads, width, generator=generator).half() for _ in range(2))
    return k, v


def definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """fp64 attention of q [T, H, hd] over k, v [n, Hkv, hd] where mask [T, n]."""
    group = q.shape[1] // k.shape[1]
    k, v = (c.double().repeat_interleave(group, dim=1) for c in (k, v))
    scores = torch.einsum("thd,nhd->htn", q.double(), k) * scale
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
    return torch.einsum("htn,nhd->thd", weights, v)


def restored(out: Tensor, layer: KVLayer) -> Tensor:
    """The weighted sums of stored values [..., hd], transformed back if these are transformed."""
    return hadamard(out) if layer.format.hadamard else out


@pytest.mark.parametrize(("heads", "kv_heads", "width", "length", "first"), SHAPES)
def test_decode(heads: int, kv_heads: int, width: int, length: int, first: int) -> None:
    k, v = random_cache(length + 3, kv_heads, width)
    q = torch.randn(heads, width, generator=torch.Generator().manual_seed(1)) * 2
    everything = torch.ones(1, length - first, dtype=torch.bool)
    expected = definition(q.unsqueeze(0), k[first:length], v[first:length], everything, width**-0.5)[0]
    results = []
    for threads in (1, MANY):
        set_threads(threads)
        results.append(attend_token(q, KVLayer(k, v), length, width**-0.5, first))
    assert nmse(results[0], expected) <= 1e-11
    assert torch.equal(results[0], results[1])


def test_soft_capped_scores() -> None:
    k, v = random_cache(300, 2, 64)
    q = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)) * 2
    batch = decode_batch([0], [299], [[list(range(10))]], torch.device("cpu"))
    padded = [torch.cat([c, torch.zeros(20, 2, 64).half()]) for c in (k, v)]
    out = batch_attention(q, KVLayer(*padded), batch, 0.5, None, cap=4.0)
    expected = attention(q.double(), k.double(), v.double(), None, 0.5, cap=4.0)
    assert nmse(out, expected) <= 1e-11


def test_decode_reads_a_cache_with_heads_first() -> None:
    k, v = random_cache(300, 2, 64)
    q = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    heads_first = [c.transpose(0, 1).contiguous().transpose(0, 1) for c in (k, v)]
    assert not heads_first[0].is_contiguous()
    assert torch.equal(
        attend_token(q, KVLayer(*heads_first), 299, 0.125), attend_token(q, KVLayer(k, v), 299, 0.125)
    )


def test_decode_with_scores_far_apart() -> None:
    k, v = random_cache(600, 1, 32)
    k[70] = 300.0
    q = torch.full((1, 32), 30.0)
    torch.testing.assert_close(attend_token(q, KVLayer(k, v), 600, 1.0)[0], v[70, 0].float())


def test_decode_passes_on_what_is_not_finite() -> None:
    k, v = random_cache(40, 1, 32)
    k[11, 0, 3] = float("nan")
    assert torch.isnan(attend_token(torch.ones(1, 32), KVLayer(k, v), 40, 1.0)).all()
    assert torch.isfinite(attend_token(torch.ones(1, 32), KVLayer(k, v), 11, 1.0)).all()


SINKS = pytest.mark.parametrize("sink", [-1e30, -3.0, 0.7, 1e4])


def sinks_near(sink: float, heads: int) -> Tensor:
    """A logit for each head, all different."""
    return sink * (1.0 + 0.1 * torch.arange(heads))


@SINKS
@pytest.mark.parametrize(("length", "first"), [(1, 0), (77, 76), (700, 0), (519, 100)])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_sinks_are_in_the_denominator(cache_type: CacheType, length: int, first: int, sink: float) -> None:
    layer = allocate_layer(length + 3, 2, 64, "cpu", cache_type)
    write_rows(layer, 0, *(rows.float() for rows in random_cache(length + 3, 2, 64)))
    q, sinks = torch.randn(6, 64, generator=torch.Generator().manual_seed(1)) * 2, sinks_near(sink, 6)
    k, v = (rows.double() for rows in read_rows(layer, slice(first, length)))
    expected = restored(attention(q.double().unsqueeze(0), k, v, None, 0.125, sinks.double())[0], layer)
    one = [attend_token(q, layer, length, 0.125, first, sinks) for n in (1, MANY) if not set_threads(n)]
    if sink == 1e4:
        assert not one[0].any() and expected.abs().max() < 1e-30
    else:
        assert nmse(one[0], expected) <= 1e-11
    assert torch.equal(one[0], one[1])


def test_a_sink_far_below_all_scores_leaves_the_bits() -> None:
    k, v = random_cache(300, 2, 64)
    q, sinks = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)), torch.full((4,), -1e30)
    plain = attend_token(q, KVLayer(k, v), 300, 0.125)
    assert torch.equal(attend_token(q, KVLayer(k, v), 300, 0.125, sinks=sinks), plain)


def test_sinks_of_another_shape_or_type_are_refused() -> None:
    layer = KVLayer(*random_cache(8, 2, 32))
    for sinks in (torch.zeros(3), torch.zeros(4).double(), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match=r"sinks are fp32 \[4\]"):
            attend_token(torch.zeros(4, 32), layer, 4, 1.0, sinks=sinks)


def test_decode_refuses_what_it_would_read_wrongly() -> None:
    k, v = random_cache(8, 2, 32)
    layer, q = KVLayer(k, v), torch.zeros(4, 32)
    with pytest.raises(ValueError, match="do not fit"):
        attend_token(torch.zeros(3, 32), layer, 4, 1.0)
    with pytest.raises(ValueError, match="fp16"):
        attend_token(q, KVLayer(k.float(), v.float()), 4, 1.0)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "length", "first"),
    [(9, 3, 64, 1, 0), (4, 1, 128, 700, 0), (6, 2, 96, 519, 100), (2, 2, 32, 258, 1)],
)
@pytest.mark.parametrize("cache_type", ["q8_0", "q4_0"])
def test_a_cache_of_codes_gives_what_its_values_give(
    cache_type: CacheType, heads: int, kv_heads: int, width: int, length: int, first: int
) -> None:
    layer = allocate_layer(length + 3, kv_heads, width, "cpu", cache_type)
    write_rows(layer, 0, *(rows.float() for rows in random_cache(length + 3, kv_heads, width)))
    k, v = read_rows(layer, slice(first, length))
    q = torch.randn(heads, width, generator=torch.Generator().manual_seed(1)) * 2
    everything = torch.ones(1, length - first, dtype=torch.bool)
    expected = restored(definition(q.unsqueeze(0), k, v, everything, width**-0.5)[0], layer)
    one = [attend_token(q, layer, length, width**-0.5, first) for n in (1, MANY) if not set_threads(n)]
    assert nmse(one[0], expected) <= 1e-11 and torch.equal(one[0], one[1])
