"""Decode attention with heads of 256 and an fp16 cache, against the definitions in fp64. One sequence on a GPU has a
kernel of its own for them."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.attention import attention
from quengine.kernels.cuda.attention.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention.attention_decode import attention_decode
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import apply_rope
from tests.kernels.cuda.attention.attention_cases import make_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONTEXT, WIDTH = 704, 256


@pytest.mark.parametrize("position", [0, 37, 130, 699])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "v_norm"), [(2, 1, None, False), (4, 2, 100, False), (4, 1, 300, True)]
)
def test_one_sequence(heads: int, kv_heads: int, window: int | None, v_norm: bool, position: int) -> None:
    generator = torch.Generator().manual_seed(position + heads)
    q_norm, k_norm = (torch.rand(2, WIDTH, generator=generator) + 0.5).to(DEVICE)
    spec = make_spec(DEVICE, CONTEXT, heads, kv_heads, WIDTH, window, "halves", None, (q_norm, k_norm))
    spec = replace(spec, v_norm=v_norm)
    layer = allocate_layer(CONTEXT, kv_heads, WIDTH, DEVICE)
    for tensor in (layer.k, layer.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    before = layer.k.clone(), layer.v.clone()
    qkv = torch.randn(1, (heads + 2 * kv_heads) * WIDTH, generator=generator).to(DEVICE)
    at = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    table = torch.arange(CONTEXT // 32, dtype=torch.int32, device=DEVICE).view(1, -1)
    workspace = DecodeWorkspace.allocate(1, heads, kv_heads, WIDTH, DEVICE)
    out = torch.full((1, heads * WIDTH), float("nan"), device=DEVICE)
    attention_decode(qkv, spec, layer, at, table, workspace, out)

    q, k, v = qkv.double().view(1, -1, WIDTH).split([heads, kv_heads, kv_heads], dim=1)
    q, k = rms_norm(q, q_norm.double(), spec.eps), rms_norm(k, k_norm.double(), spec.eps)
    cos, sin = spec.cos[position : position + 1], spec.sin[position : position + 1]
    q, k = apply_rope(q, cos, sin, "halves"), apply_rope(k, cos, sin, "halves")
    if v_norm:
        v = rms_norm(v, v.new_ones(WIDTH), spec.eps)
    first = 0 if window is None else max(0, position + 1 - window)
    keys, values = (
        torch.cat((old[first:position].double(), new.half().double()))
        for old, new in zip(before, (k, v), strict=True)
    )
    wanted = attention(q, keys, values, None, spec.scale, None, 0.0).flatten()
    assert (out[0].double() - wanted).norm() / wanted.norm() < 3e-6
    for kept, old, new in zip((layer.k, layer.v), before, (k, v), strict=True):
        torch.testing.assert_close(kept[position].double(), new[0], rtol=0, atol=4e-3)
        kept[position] = old[position]
        assert torch.equal(kept, old), "a row of another position changed"
