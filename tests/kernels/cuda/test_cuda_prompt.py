"""A prompt long enough for cuBLAS, on the CUDA backend against the reference: nothing between its matmuls is fp32 rows
any more, but products, scaled fp16 and the residual stream."""

from pathlib import Path

import pytest
import torch

from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm import workspace
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from tests.fork_server import without_interpreter
from tests.forward import forward
from tests.gguf_builder import ModelSizes
from tests.kernels.cuda.test_cuda_backend import logits
from tests.kernels.cuda.weights import nmse
from tests.tiny_models import write_tiny


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "arcee", "cohere2"])
def test_a_prompt_through_expanded_weights_is_the_reference(
    architecture: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "fused_limit", lambda _: 2)
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    path = write_tiny(tmp_path / "m.gguf", architecture=architecture)
    ours, exact = logits(path, CudaBackend(device), [4, 1]), logits(path, ReferenceBackend(keep=True), [4, 1])
    assert nmse(ours, exact) < 5e-5


@pytest.mark.parametrize("rows", [(300,), (256, 44)], ids=str)
def test_a_prompt_on_packed_weights_is_the_reference(
    rows: tuple[int, ...], device: torch.device, tmp_path: Path
) -> None:
    """More rows than a program of Hopper's matmul takes, of widths that it takes."""
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    sizes = ModelSizes(
        blocks=2, embedding=256, feed_forward=512, heads=4, kv_heads=2, head_dim=64, context=512
    )
    path = write_tiny(tmp_path / "m.gguf", "llama", "Q8_0", sizes=sizes)
    checkpoint, found = GGUFCheckpoint(path), []
    for backend in (CudaBackend(device), ReferenceBackend(keep=True)):
        decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 320, 320)
        cache, start = KVCache.allocate(checkpoint.config, 320, backend.device), 0
        for length in rows:
            ids = [(7 * i) % 250 for i in range(start, start + length)]
            found.append(forward(decoder, ids, cache.layers, start, all_logits=True).cpu())
            start += length
    ours, exact = torch.cat(found[: len(rows)]), torch.cat(found[len(rows) :])
    assert nmse(ours, exact) < 2e-5  # so narrow a model makes 6e-6 of rounding to fp16, by whatever kernels


ROOM = """
import torch
from benchmarks.checks.aot_cases import plan_of
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.kernels.cuda.aot.meta_backend import META, gpu_for
from quengine.kernels.cuda.launch.gpu import assuming
from quengine.models.synthetic.presets import PRESETS
from quengine.step_plan import SequenceRows, forward_batch

def layers(graphs):
    decoder, stream = graphs.decoder, torch.empty(2048, 4096, device=META)
    batch, x = forward_batch("prefill", [SequenceRows([0] * 2048, 0, [[0] * 64])], META), stream
    for layer, cache in zip(decoder.blk, graphs.cache.layers):
        x = layer(batch, x, cache, decoder.output_norm)
        assert x.hidden is stream, "the residual stream is held twice"

with assuming(gpu_for(90)), torch.no_grad():
    (graphs,) = plan_of(PRESETS["mistral-7b-2l"]).graphs()
    record(lambda: layers(graphs))
    room = graphs.decoder.backend._room()
print(room.nbytes)
"""


def test_a_chunk_of_a_7b_model_needs_little_room_beside_its_weights() -> None:
    """All that is kept for 2048 rows: below 0.2 GB, of which SwiGLU's rows are 0.06. No weights are dequantized. On no
    device, in a process of its own: launches are recorded, which the interpreter's are not."""
    assert 0.1e9 < int(without_interpreter(ROOM)) < 0.2e9
