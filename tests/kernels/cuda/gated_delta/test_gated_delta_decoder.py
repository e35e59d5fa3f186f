"""A whole decoder with gated delta nets and gated attention on the CUDA backend against the reference."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.errors import EngineError
from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.forward_batch import StateCheckpoint, decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.runners.graph_keys import GraphKey
from quengine.runners.static_inputs import PrefillInputs
from quengine.step_plan import SequenceRows
from tests.kernels.cuda.weights import nmse
from tests.kernels.gated_delta_steps import Shape, expected, rows_of, spec_of, states
from tests.kernels.short_conv_steps import prompt

IDS = [(7 * i) % 60 for i in range(67)]


@pytest.fixture(autouse=True)
def _without_dependent_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)


def written(folder: Path, head_dim: int) -> Checkpoint:
    preset = synthetic_preset("qwen3.5-tiny")
    assert preset is not None
    small = replace(
        preset, embedding_length=64, feed_forward_length=64, vocab_size=320, head_count=2, head_count_kv=1,
        head_dim=32, rope_dim=16, delta_head_dim=head_dim, key_heads=1, value_heads=4, quant="Q8_0",
    )  # fmt: skip
    return open_checkpoint(write_synthetic(folder / "tiny.gguf", small))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return written(tmp_path_factory.mktemp("delta"), 32)


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


def test_a_decoder_is_the_reference(model: Checkpoint, device: torch.device) -> None:
    """A prompt over the end of a chunk, then a token."""
    lengths = [66, 1]
    ours, exact = (
        logits(model, each, lengths) for each in (CudaBackend(device), ReferenceBackend(keep=True))
    )
    assert nmse(ours[:66], exact[:66]) < 2e-5 and nmse(ours[66:], exact[66:]) < 2e-5


def test_other_heads_are_refused_at_load(tmp_path: Path, device: torch.device) -> None:
    model = written(tmp_path, 24)
    with pytest.raises(EngineError, match="elements, and this model's have 24; use --device cpu"):
        Decoder(model.config, model.tensors, CudaBackend(device), 128, 128)
    assert Decoder(model.config, model.tensors, ReferenceBackend(keep=False), 128, 128)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_prompt_of_one_row_writes_its_checkpoint(batch_invariant: bool, device: torch.device) -> None:
    shape = Shape(1, 2, 32)
    spec, state = spec_of(shape), states(shape)
    batch, x = prompt([1], [31], [1], [[StateCheckpoint(32, 3)]]), rows_of(1, shape, 4)
    wanted, _, memory = expected(batch, x, spec, *state)
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    vectors = {name: getattr(spec, name).to(device) for name in ("conv", "decay", "bias", "norm")}
    tables = {"block_tables": batch.block_tables.to(device), "positions": batch.positions.to(device)}
    step = replace(batch, token_ids=batch.token_ids.to(device), **tables)
    backend = CudaBackend(device, batch_invariant=batch_invariant)
    rows = backend.gated_delta(step, x.to(device), replace(spec, **vectors), layer)
    y = rows.dequantize()[:, :64]
    assert nmse(y.cpu(), wanted) < 1e-6
    torch.testing.assert_close(layer.parts[1].cpu()[1:], memory[1:], rtol=2e-5, atol=2e-5)
    assert all(torch.equal(part[3], part[1]) for part in layer.parts)


def test_a_captured_prompt_has_rows_of_padding(device: torch.device) -> None:
    """The step of three chunks in one of 128 rows, whose tiles, of attention's size, are on the device alone."""
    shape, lengths, starts, slots = Shape(1, 1, 128), [70, 1, 9], [0, 5, 64], [1, 3, 2]
    spec, state = spec_of(shape), states(shape)
    eager = prompt(lengths, starts, slots)
    x = rows_of(80, shape, 4)
    wanted, _, memory = expected(eager, x, spec, *state)
    inputs = PrefillInputs(256, 256, False, 2, device)
    key = GraphKey("prefill", 128, 4)
    tables = eager.block_tables.transpose(0, 1).tolist()
    parts = zip(lengths, starts, tables, strict=True)
    inputs.send(key, [SequenceRows([0] * length, start, tuple(table)) for length, start, table in parts])
    layer = SlotLayer(tuple(part.clone().to(device) for part in state))
    padded = torch.cat([x, torch.full((48, x.shape[1]), 3.0)]).to(device)
    vectors = {name: getattr(spec, name).to(device) for name in ("conv", "decay", "bias", "norm")}
    rows = CudaBackend(device).gated_delta(inputs.batch(key), padded, replace(spec, **vectors), layer)
    assert isinstance(rows, Fp16Operand)
    y = rows.dequantize().cpu()
    assert nmse(y[:80], wanted) < 1e-6 and not y[80:].any()
    torch.testing.assert_close(layer.parts[1].cpu()[1:], memory[1:], rtol=2e-5, atol=2e-5)
    assert torch.equal(layer.parts[1].cpu()[0], state[1][0])
