"""A whole decoder with mixtures of experts on the CUDA backend against the reference: tokens, prompts before them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.blocks import AttentionForm, BlockForm, FeedForwardForm
from quengine.models.blocks.experts import ExpertConfig, ExpertsForm
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.experts import MixtureOfExperts
from quengine.models.tensor_table import required_tensors
from tests.forward import forward
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import small_config

IDS = [5, 17, 50, 3]
EXPERTS = ExpertConfig(4, RouterKind(2), feed_forward_length=32, dense_layers=(0,))
WEIGHED = replace(
    EXPERTS, router=RouterKind(1, "sigmoid", False, weighs_inputs=True), shared_feed_forward_length=32
)
CONFIGS = {
    "dense layer first": small_config(),
    "biases, clamped": replace(
        small_config(),
        block=BlockForm(
            feed_forward=FeedForwardForm(activation="clamped_swish"), experts=ExpertsForm(bias=True)
        ),
        block_count=1,
    ),
    "weighed inputs": replace(
        small_config(), architecture="llama4", block=BlockForm(AttentionForm(unit_norms=True))
    ),
    "a shared expert": replace(
        small_config(), architecture="qwen2moe", block=BlockForm(experts=ExpertsForm(shared_gate=True))
    ),
}


def model(name: str, kind: str) -> tuple[ModelConfig, dict[str, QuantTensor]]:
    """A tiny model with experts; matrices are of type `kind`, norms and biases plain."""
    config = replace(CONFIGS[name], vocab_size=64, context_length=64, feed_forward_length=32)
    experts = (
        WEIGHED
        if name == "weighed inputs"
        else replace(EXPERTS, shared_feed_forward_length=32)
        if name == "a shared expert"
        else EXPERTS
        if config.block_count > 1
        else replace(EXPERTS, dense_layers=())
    )
    config = replace(config, experts=experts)
    rng, tensors = np.random.default_rng(0), {}
    for tensor, shape in required_tensors(config).items():
        values = rng.standard_normal(shape).astype(np.float32)
        values = 1 + 0.1 * values if "norm" in tensor else values * 2 / shape[-1] ** 0.5
        stored = kind if len(shape) > 1 and "gate_inp" not in tensor else "F32"
        rows = quantize(values.reshape(-1, shape[-1]), GGMLQuantizationType[stored]).view(np.uint8)
        data = torch.from_numpy(rows.reshape(values.size // shape[-1], -1).copy())
        tensors[tensor] = QuantTensor(tensor, FORMATS[stored], tuple(shape), data)
    return config, tensors


def logits(name: str, kind: str, backend: CudaBackend | ReferenceBackend, chunks: list[int]) -> torch.Tensor:
    config, tensors = model(name, kind)
    decoder = Decoder(config, tensors, backend, 32, 32)
    if name == "a shared expert":
        mixtures = [block.ffn for block in decoder.blk if isinstance(block.ffn, MixtureOfExperts)]
        assert mixtures and all(ffn.router.joins_shared and ffn.gate_up.rows == 5 * 64 for ffn in mixtures)
    cache = KVCache.allocate(config, 32, backend.device)
    parts, start = [], 0
    for length in chunks:
        ids = IDS[start : start + length]
        parts.append(forward(decoder, ids, cache.layers, start, all_logits=True))
        start += length
    return torch.cat(parts).cpu()


@pytest.mark.parametrize(
    ("name", "kind", "chunks"),
    [
        ("dense layer first", "Q8_0", [1, 1]),
        ("dense layer first", "Q8_0", [3]),
        ("biases, clamped", "F16", [3, 1]),
        ("weighed inputs", "Q8_0", [3, 1]),
        ("a shared expert", "Q8_0", [1, 1]),
        ("a shared expert", "Q8_0", [3, 1]),
    ],
)
def test_a_decoder_with_experts_is_the_reference(
    name: str, kind: str, chunks: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    ours = logits(name, kind, CudaBackend(device), chunks)
    exact = logits(name, kind, ReferenceBackend(keep=True), chunks)
    assert nmse(ours, exact) < (1e-6 if chunks[0] == 1 else 5e-5)
