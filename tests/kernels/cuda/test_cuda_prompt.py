"""A prompt long enough for cuBLAS, on the CUDA backend against the reference: nothing between its matmuls is fp32 rows
any more, but products, scaled fp16 and the residual stream."""

from pathlib import Path

import pytest
import torch

from quengine.kernels import cuda_backend
from quengine.kernels.cuda import matmul
from quengine.kernels.cuda_backend import CudaBackend
from quengine.kernels.reference import ReferenceBackend
from tests.kernels.cuda.test_cuda_backend import logits
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import write_tiny


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_prompt_through_expanded_weights_is_the_reference(
    architecture: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "fused_limit", lambda: 2)
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture)
    ours, exact = logits(path, CudaBackend(device), [4, 1]), logits(path, ReferenceBackend(keep=True), [4, 1])
    assert nmse(ours, exact) < 5e-5
