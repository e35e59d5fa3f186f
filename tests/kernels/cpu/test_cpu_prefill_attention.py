"""CPU attention of a prompt's tokens over caches of every type, against fp64."""

import pytest
import torch
from torch import Tensor

from quengine.errors import CannotRunError
from quengine.kernels.attention import attention
from quengine.kernels.backend import KVLayer
from quengine.kernels.cpu import prefill_attention, set_threads
from quengine.kernels.cpu.gemm.amx import has_amx
from quengine.kernels.cpu.runtime.threads import max_threads
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, read_rows, write_rows
from tests.kernels.cpu.cpu_runs import attend_chunk
from tests.kernels.cpu.test_cpu_attention import SINKS, definition, restored, sinks_near
from tests.kernels.weights import nmse

MANY = max_threads()
MOST_ERROR = 5e-9 if has_amx() else 1e-11  # tiles multiply two bf16 terms, the other kernels fp32


def queries(tokens: int, heads: int, width: int) -> Tensor:
    return torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(1)) * 2


def random_layer(ctx: int, kv_heads: int, width: int, cache_type: CacheType = "f16") -> KVLayer:
    layer = allocate_layer(ctx, kv_heads, width, "cpu", cache_type)
    generator = torch.Generator().manual_seed(ctx)
    write_rows(layer, 0, *(torch.randn(ctx, kv_heads, width, generator=generator) for _ in range(2)))
    return layer


def expected(q: Tensor, layer: KVLayer, start: int, window: int | None) -> Tensor:
    end = start + q.shape[0]
    distance = torch.arange(start, end).unsqueeze(1) - torch.arange(end)
    mask = (distance >= 0) & (distance < (window or end))
    return restored(definition(q, *read_rows(layer, slice(0, end)), mask, q.shape[2] ** -0.5), layer)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "start", "tokens", "window"),
    [
        (9, 3, 64, 0, 1, None),
        (9, 3, 64, 0, 77, None),
        (4, 1, 128, 600, 100, None),
        (6, 2, 96, 250, 269, 100),
        (4, 4, 32, 3, 255, 7),
        (5, 1, 256, 511, 2, 256),
        (4, 2, 512, 250, 70, None),
        (3, 1, 288, 0, 9, 5),
    ],
)
def test_it_is_the_definition_on_any_number_of_threads(
    cache_type: CacheType, heads: int, kv_heads: int, width: int, start: int, tokens: int, window: int | None
) -> None:
    layer = random_layer(start + tokens + 3, kv_heads, width, cache_type)
    q = queries(tokens, heads, width)
    results = []
    for threads in (1, MANY):
        set_threads(threads)
        results.append(attend_chunk(q, layer, start, width**-0.5, window))
    assert nmse(results[0], expected(q, layer, start, window)) <= MOST_ERROR
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("width", [64, 512])
def test_soft_capped_scores(width: int) -> None:
    layer, q = random_layer(330, 2, width), queries(70, 4, width)
    out = prefill_attention(q, layer, 260, 0.5, 100, torch.arange(11), cap=4.0)
    k, v = (rows.double() for rows in read_rows(layer, slice(0, 330)))
    distance = torch.arange(260, 330).unsqueeze(1) - torch.arange(330)
    expected = attention(q.double(), k, v, (distance >= 0) & (distance < 100), 0.5, cap=4.0)
    assert nmse(out, expected) <= MOST_ERROR


@SINKS
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_sinks_are_in_the_denominator_of_every_row(
    cache_type: CacheType, window: int | None, sink: float
) -> None:
    layer, q, sinks = random_layer(533, 2, 64, cache_type), queries(270, 6, 64), sinks_near(sink, 6)
    out = attend_chunk(q, layer, 260, 0.125, window, sinks)
    k, v = (rows.double() for rows in read_rows(layer, slice(0, 530)))
    distance = torch.arange(260, 530).unsqueeze(1) - torch.arange(530)
    mask = (distance >= 0) & (distance < (window or 530))
    expected = restored(attention(q.double(), k, v, mask, 0.125, sinks.double()), layer)
    if sink == 1e4:
        assert not out.any() and expected.abs().max() < 1e-30
    else:
        assert nmse(out, expected) <= MOST_ERROR
    assert torch.equal(attend_chunk(q[200:], layer, 460, 0.125, window, sinks), out[200:])
    if sink == -1e30:
        assert torch.equal(out, attend_chunk(q, layer, 260, 0.125, window))


@pytest.mark.parametrize("width", [7, 20, 80])
def test_heads_of_an_odd_size(width: int) -> None:
    layer, q = random_layer(70, 2, width), queries(70, 4, width)
    assert nmse(attend_chunk(q, layer, 0, width**-0.5), expected(q, layer, 0, None)) <= MOST_ERROR


@pytest.mark.parametrize("window", [None, 90, 300])
def test_a_token_does_not_depend_on_the_chunk_it_is_in(window: int | None) -> None:
    layer, q = random_layer(530, 1, 64), queries(530, 3, 64)
    whole = attend_chunk(q, layer, 0, 0.125, window)
    for chunk in (1, 13, 200, 256):
        for start in range(0, 530, 5 * chunk):
            part = attend_chunk(q[start : start + chunk], layer, start, 0.125, window)
            assert torch.equal(part, whole[start : start + chunk])


def test_queries_and_caches_of_any_strides_are_read() -> None:
    layer, q = random_layer(40, 2, 64), queries(40, 4, 128)[..., 32:96]
    apart = KVLayer(layer.k.contiguous(), layer.v.contiguous())
    assert apart.k.stride() != layer.k.stride() and not q.is_contiguous()
    expected_rows = attend_chunk(q.contiguous(), layer, 0, 0.125)
    assert torch.equal(attend_chunk(q, apart, 0, 0.125), expected_rows)


def test_scores_far_apart_and_what_is_not_finite() -> None:
    layer, q = random_layer(600, 1, 32), torch.full((600, 1, 32), 30.0)
    layer.k[70] = 300.0
    out = attend_chunk(q, layer, 0, 1.0)
    torch.testing.assert_close(out[599, 0], layer.v[70, 0].float())
    layer.k[400, 0, 3] = float("nan")
    out = attend_chunk(q, layer, 0, 1.0)
    assert torch.isnan(out[400:]).all() and torch.isfinite(out[:400]).all()


def test_it_refuses_what_it_would_read_wrongly() -> None:
    layer, q = random_layer(8, 2, 32), queries(4, 4, 32)
    for arguments in [(q, layer, 29, 1.0), (q, layer, -1, 1.0), (queries(4, 3, 32), layer, 0, 1.0)]:
        with pytest.raises(ValueError, match=r"positions|do not fit"):
            attend_chunk(*arguments)
    with pytest.raises(ValueError, match="fp16"):
        attend_chunk(q, KVLayer(layer.k.float(), layer.v.float()), 0, 1.0)
    with pytest.raises(CannotRunError, match="heads of 768"):
        attend_chunk(queries(2, 1, 768), random_layer(8, 1, 768), 0, 1.0)
