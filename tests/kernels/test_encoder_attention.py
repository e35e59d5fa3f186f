"""Attention among all rows of a text: the definition against torch's operation, each text by itself."""

import pytest
import torch

from quengine.kernels.encoder_attention import EncoderAttentionSpec, encoder_attention, fused_attention
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import RopeSpec, apply_rope, rope_table
from tests.kernels.weights import randn

SPEC = EncoderAttentionSpec(heads=2, head_dim=8, scale=0.3)


def test_texts_of_a_step_see_themselves_alone() -> None:
    batch = prefill_batch([[1, 2, 3], [4, 5]], [0, 0], [[[0]], [[0]]], torch.device("cpu"))
    qkv = randn(5, 48)
    found = encoder_attention(batch, qkv.double(), SPEC)
    torch.testing.assert_close(fused_attention(batch, qkv, SPEC).double(), found, rtol=1e-5, atol=1e-6)
    alone = prefill_batch([[4, 5]], [0], [[[0]]], torch.device("cpu"))
    torch.testing.assert_close(encoder_attention(alone, qkv[3:].double(), SPEC), found[3:])
    q, k, v = (qkv[3:].double().view(2, 3, 2, 8)[:, part, 1] for part in range(3))
    torch.testing.assert_close(torch.softmax(q @ k.T * 0.3, 1) @ v, found[3:, 8:])


@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("reach", [None, 1, 7])
def test_heads_that_share_keys_see_as_far_as_they_reach(
    length: int, reach: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Normed and rotated as the definition has it, a few queries at a time."""
    monkeypatch.setattr("quengine.kernels.encoder_attention._QUERIES_AT_A_TIME", 16)
    cos, sin = rope_table(RopeSpec(8, 100.0, "halves"), 64)
    weights = (randn(8).double() + 1.0, randn(8).double() + 1.0)
    spec = EncoderAttentionSpec(4, 8, 0.3, cos, sin, 2, *weights, eps=1e-6, reach=reach)
    batch = prefill_batch([list(range(length)), [1]], [0, 0], [[[0]], [[0]]], torch.device("cpu"))
    qkv = randn(length + 1, 64).double()
    found = encoder_attention(batch, qkv, spec)
    torch.testing.assert_close(fused_attention(batch, qkv, spec), found)
    q, k, v = qkv[:length].view(length, 8, 8).split((4, 2, 2), 1)
    q, k = (
        apply_rope(rms_norm(part, weight, 1e-6), cos[:length].double(), sin[:length].double(), "halves")
        for part, weight in zip((q, k), weights, strict=True)
    )
    for head in range(4):
        scores = q[:, head] @ k[:, head // 2].T * 0.3
        far = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        scores[far.abs() > (length if reach is None else reach)] = -torch.inf
        expected = torch.softmax(scores, 1) @ v[:, head // 2]
        torch.testing.assert_close(found[:length, 8 * head : 8 * head + 8], expected)
