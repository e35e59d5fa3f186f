"""An encoder on CUDA: the rows of texts of one step, and of a single token, are the reference backend's."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.models.encoder import Encoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.gguf_builder import ENCODERS
from tests.kernels.weights import nmse
from tests.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("bert", "F16"), *((name, "Q8_0") for name in ENCODERS)],
)
@pytest.mark.parametrize("texts", [[[5, 17, 50, 3], [7, 9]], [[5]]], ids=["two texts", "one token"])
def test_rows_are_the_references(
    architecture: str,
    kind: str,
    texts: list[list[int]],
    device: torch.device,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    checkpoint = GGUFCheckpoint(write_tiny(tmp_path / "m.gguf", architecture, kind))

    def rows(backend: Any) -> torch.Tensor:
        encoder = Encoder(checkpoint.config, checkpoint.tensors, backend, 64)
        batch = prefill_batch(texts, [0] * len(texts), [[[0]]] * len(texts), backend.device)
        with torch.no_grad():
            return encoder.hidden(batch).cpu().double()

    assert nmse(rows(CudaBackend(device)), rows(ReferenceBackend(keep=True))) < 5e-5
