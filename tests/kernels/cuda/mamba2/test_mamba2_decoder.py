"""A whole decoder with Mamba2 layers on the CUDA backend against the reference: squared ReLU, experts, lone layers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.errors import EngineError
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from tests.kernels.cuda.weights import nmse

IDS = [(7 * i) % 60 for i in range(67)]


@pytest.fixture(autouse=True)
def _without_dependent_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)


def written(folder: Path, name: str, head_dim: int = 16) -> Checkpoint:
    preset = synthetic_preset(name)
    assert preset is not None
    small = replace(
        preset, embedding_length=64, feed_forward_length=64, vocab_size=320, head_count=2, head_count_kv=1,
        head_dim=32, rope_dim=16, mamba_heads=4, mamba_head_dim=head_dim, mamba_groups=2, mamba_state_dim=32,
        experts=min(preset.experts, 4), experts_used=min(preset.experts_used, 2), block_count=3, quant="Q8_0",
        expert_feed_forward_length=64 if preset.experts else 0,
        shared_feed_forward_length=64 if preset.experts else 0,
    )  # fmt: skip
    return open_checkpoint(write_synthetic(folder / f"{name}.gguf", small))


def logits(
    model: Checkpoint, backend: CudaBackend | ReferenceBackend, lengths: Sequence[int]
) -> torch.Tensor:
    """Of every token of a text, in prompts of these lengths; single ones are steps of decode."""
    decoder = Decoder(model.config, model.tensors, backend, 128, 128)
    pools = [CachePool(6, is_state=group.is_state) for group in model.config.cache_groups]
    cache = KVCache.allocate(model.config, 128, backend.device, pools=pools)
    tables = [[2] if group.is_state else [1, 2, 3, 4] for group in model.config.cache_groups]
    parts, start = [], 0
    for length in lengths:
        ids = IDS[start : start + length]
        if length > 1:
            batch = prefill_batch([ids], [start], [tables], backend.device, all_logits=True)
        else:
            batch = decode_batch(ids, [start], [tables], backend.device)
        parts.append(decoder.forward(batch, cache.layers))
        start += length
    return torch.cat(parts).cpu()


@pytest.mark.parametrize("name", ["nemotron-h-tiny", "nemotron-h-moe-tiny", "granitehybrid-tiny"])
def test_a_decoder_is_the_reference(name: str, tmp_path: Path, device: torch.device) -> None:
    """A prompt over the end of a chunk, then a token."""
    model, lengths = written(tmp_path, name), [66, 1]
    ours, exact = (
        logits(model, each, lengths) for each in (CudaBackend(device), ReferenceBackend(keep=True))
    )
    assert nmse(ours[:66], exact[:66]) < 2e-5 and nmse(ours[66:], exact[66:]) < 2e-5


def test_other_heads_are_refused_at_load(tmp_path: Path, device: torch.device) -> None:
    model = written(tmp_path, "nemotron-h-tiny", head_dim=24)
    with pytest.raises(
        EngineError, match="of 16 elements, up to 256, and this model's have 24; use --device cpu"
    ):
        Decoder(model.config, model.tensors, CudaBackend(device), 128, 128)
    assert Decoder(model.config, model.tensors, ReferenceBackend(keep=False), 128, 128)
