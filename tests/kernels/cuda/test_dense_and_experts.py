"""A whole decoder of Gemma 4 on the CUDA backend against the reference: heads of two sizes, values normalized and
made of keys, experts beside a feed-forward, numbers of layers, soft-capped logits, layers that share keys and values,
embeddings by layer."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.config import LayerSizes
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from tests.kernels.cuda.weights import nmse

IDS = [(7 * i) % 60 for i in range(36)]
SIZES = (LayerSizes(2, 2, 64, 32), LayerSizes(4, 1, 96, 64))


@pytest.fixture(autouse=True)
def _without_dependent_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)


@pytest.fixture(scope="module", params=["gemma-4-moe-tiny", "gemma2-tiny", "gemma-4-e-tiny"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    preset = synthetic_preset(request.param)
    assert preset is not None
    small = replace(
        preset, embedding_length=64, feed_forward_length=64, vocab_size=320, block_count=2, quant="Q8_0",
        head_count=2, head_count_kv=1, head_dim=32, sliding_window=20,
    )  # fmt: skip
    if preset.layer_sizes:
        factors = (1.0,) * 8 + (1e30,) * 24
        small = replace(small, layer_sizes=SIZES, rope_freq_factors=factors, expert_feed_forward_length=32)
    if preset.shared_kv_layers:
        sizes = (*SIZES, SIZES[1])
        small = replace(small, block_count=3, layer_sizes=sizes, shared_kv_layers=1, layer_input_length=32)
    return open_checkpoint(write_synthetic(tmp_path_factory.mktemp("gemma") / "tiny.gguf", small))


def logits(
    model: Checkpoint, backend: CudaBackend | ReferenceBackend, lengths: Sequence[int]
) -> torch.Tensor:
    """Of every token of a text, in prompts of these lengths; single ones are steps of decode."""
    decoder = Decoder(model.config, model.tensors, backend, 64, 64)
    cache = KVCache.allocate(model.config, 64, backend.device).layers
    tables = [[0, 1] for _ in model.config.cache_groups]
    parts, start = [], 0
    for length in lengths:
        ids = IDS[start : start + length]
        if length > 1:
            batch = prefill_batch([ids], [start], [tables], backend.device, all_logits=True)
        else:
            batch = decode_batch(ids, [start], [tables], backend.device)
        parts.append(decoder.forward(batch, cache))
        start += length
    return torch.cat(parts).cpu()


def test_a_decoder_is_the_reference(model: Checkpoint, device: torch.device) -> None:
    """A prompt longer than the window in two chunks, of which the second begins another block, then a token."""
    lengths = [22, 1] if model.config.shared_kv_layers else [24, 9, 1]
    prompt = sum(length for length in lengths if length > 1)
    ours, exact = (
        logits(model, each, lengths) for each in (CudaBackend(device), ReferenceBackend(keep=True))
    )
    assert exact.abs().max() < 30.0
    assert nmse(ours[:prompt], exact[:prompt]) < 2e-5 and nmse(ours[prompt:], exact[prompt:]) < 2e-5
