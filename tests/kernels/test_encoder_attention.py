"""Attention among all rows of a text: the definition against torch's operation, each text by itself."""

import torch

from quengine.kernels.encoder_attention import EncoderAttentionSpec, encoder_attention, fused_attention
from quengine.kernels.forward_batch import prefill_batch
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
