"""The attention definition against torch's SDPA and a loop, and the mask band against the visibility rule."""

from types import SimpleNamespace

import pytest
import torch

from quengine.kernels.attention import attention, causal_mask_band, mask_slice


@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("start,rows", [(0, 5), (4, 5), (11, 2), (12, 1)])
def test_band_slice_is_the_visibility_rule(window: int | None, start: int, rows: int) -> None:
    mask = mask_slice(causal_mask_band(5, 12, window), start, rows)
    assert mask.shape == (rows, start + rows)
    for r in range(rows):
        for key in range(start + rows):
            distance = start + r - key
            assert bool(mask[r, key]) == (0 <= distance < (window or 10**9))


def test_a_band_takes_the_memory_of_one_line() -> None:
    band = causal_mask_band(2048, 32768, 4096)
    assert band.shape == (2048, 34816) and band.untyped_storage().nbytes() < 40000


def test_slice_outside_the_band_is_refused() -> None:
    band = causal_mask_band(4, 8)
    for start, rows in ((9, 1), (0, 5), (-1, 2)):
        with pytest.raises(ValueError, match="no slice"):
            mask_slice(band, start, rows)


@pytest.mark.parametrize("heads,kv_heads,head_dim", [(4, 4, 16), (6, 2, 80), (8, 1, 64)])
@pytest.mark.parametrize("window", [None, 7])
def test_matches_sdpa_with_grouped_heads(
    heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(9, heads, head_dim, generator=generator, dtype=torch.float64)
    k = torch.randn(20, kv_heads, head_dim, generator=generator, dtype=torch.float64)
    v = torch.randn(20, kv_heads, head_dim, generator=generator, dtype=torch.float64)
    mask = mask_slice(causal_mask_band(16, 32, window), 11, 9)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, scale=0.3, enable_gqa=True
    ).transpose(0, 1)
    torch.testing.assert_close(attention(q, k, v, mask, 0.3), expected, rtol=1e-12, atol=1e-12)


def test_decode_equals_the_last_row_of_prefill() -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(6, 4, 32, generator=generator)
    k, v = torch.randn(2, 6, 2, 32, generator=generator)
    whole = attention(q, k, v, mask_slice(causal_mask_band(6, 6), 0, 6), 32**-0.5)
    torch.testing.assert_close(attention(q[-1:], k, v, None, 32**-0.5), whole[-1:])


@pytest.mark.parametrize("sink", [-1e30, -2.0, 0.5, 1e4])
@pytest.mark.parametrize("window", [None, 1, 7])
def test_sinks_are_those_of_transformers(window: int | None, sink: float) -> None:
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(9, heads, 16, generator=generator, dtype=torch.float64) for heads in (6, 2, 2))
    sinks = torch.randn(6, generator=generator, dtype=torch.float64) + sink
    mask = mask_slice(causal_mask_band(9, 9, window), 0, 9)
    additive = torch.zeros(1, 1, 9, 9, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)
    layer = SimpleNamespace(num_key_value_groups=3, sinks=sinks, training=False)
    batched = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected, _ = eager_attention_forward(layer, *batched, additive, scaling=0.3)
    torch.testing.assert_close(attention(q, k, v, mask, 0.3, sinks), expected[0], rtol=1e-12, atol=1e-12)


def test_uneven_groups_are_refused() -> None:
    q, k = torch.zeros(1, 3, 8), torch.zeros(1, 2, 8)
    with pytest.raises(ValueError, match="3 query heads"):
        attention(q, k, k, None, 1.0)
