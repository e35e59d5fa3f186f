"""Kept hidden rows: the kernels against the definition, and a layer that drafts against the reference backend."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.block_pool import CachePool
from quengine.kernels.cuda import backend as cuda_backend
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.hidden_rows import hidden_before, joined, keep_hidden
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.hidden_rows import keep_rows, rows_before
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.draft_decoder import DraftDecoder
from quengine.models.eagle_checkpoint import open_eagle
from quengine.models.eagle_decoder import EagleDecoder
from quengine.models.fused_rows import FusedRows
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from tests.eagle_files import Eagle
from tests.kernels.cuda.weights import nmse

TABLES = [[3, 1, 6], [2, 5, 4]]
WIDTH = 96


def steps(device: torch.device) -> dict[str, ForwardBatch]:
    tables = [[table] for table in TABLES]
    return {
        "decode": decode_batch([1, 2, 3, 4, 5], [0, 31, 32, 33, 95], [*[tables[0]] * 4, tables[1]], device),
        "a prompt": prefill_batch([[1] * 7], [30], tables[:1], device),
        "prompts": prefill_batch([[1] * 5, [2] * 40], [0, 31], tables, device),
    }


@pytest.mark.parametrize("step", ["decode", "a prompt", "prompts"])
def test_rows_are_those_of_the_definition(step: str, device: torch.device) -> None:
    random = torch.Generator().manual_seed(2)
    ours, plain = steps(device)[step], steps(torch.device("cpu"))[step]
    x, kept = (torch.randn(rows, WIDTH, generator=random) for rows in (len(plain), 7 * 32))
    norms = [RMSNorm(torch.randn(WIDTH, generator=random), eps) for eps in (1e-5, 1e-6)]
    here = [replace(norm, weight=norm.weight.to(device)) for norm in norms]
    sequences = None
    if plain.phase == "prefill":
        counts = torch.tensor(plain.query_lens)
        sequences = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(device)
    kept = kept.half()
    before = rows_before(plain, kept)
    halves = [rms_norm(rows, norm.weight, norm.eps) for rows, norm in zip((x, before), norms, strict=True)]
    stored = kept.clone().to(device)
    both = joined(ours, x.to(device), here[0], stored, here[1], sequences)
    torch.testing.assert_close(both.cpu(), torch.cat(halves, 1), rtol=1e-5, atol=1e-6)
    for newest in (True, False) if step == "decode" else (False,):
        changed, stored = kept.clone(), kept.clone().to(device)
        keep_hidden(ours, x.to(device), here[0], stored, sequences, newest)
        keep_rows(plain, halves[0], changed, newest)
        torch.testing.assert_close(stored.cpu(), changed, rtol=2e-3, atol=1e-6)
        written = (changed != kept).any(1).sum()
        assert written == (len(plain) - 2 if newest else len(plain))
    found = hidden_before(ours, kept.clone().to(device), here[1], sequences)
    torch.testing.assert_close(found.cpu(), halves[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("step", ["decode", "prompts"])
def test_rows_as_they_are_have_the_bits_of_the_definition(step: str, device: torch.device) -> None:
    """In fp32, without a norm."""
    random = torch.Generator().manual_seed(3)
    ours, plain = steps(device)[step], steps(torch.device("cpu"))[step]
    x, kept = (1e5 * torch.randn(rows, WIDTH, generator=random) for rows in (len(plain), 7 * 32))
    sequences, stored = None, kept.clone().to(device)
    if plain.phase == "prefill":
        counts = torch.tensor(plain.query_lens)
        sequences = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(device)
    before = hidden_before(ours, stored, None, sequences)
    assert torch.equal(before.cpu(), rows_before(plain, kept))
    keep_hidden(ours, x.to(device), None, stored, sequences, plain.phase == "decode")
    keep_rows(plain, x, kept, plain.phase == "decode")
    assert torch.equal(stored.cpu(), kept)


def test_a_layer_that_drafts_is_the_reference(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt, a step of single rows of two sequences, and one of a sequence alone, which reads its own row."""
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    sizes = {"vocab_size": 320, "embedding_length": 64, "feed_forward_length": 64, "head_count": 2}
    sizes |= {"head_count_kv": 1, "head_dim": 32, "delta_head_dim": 32, "key_heads": 1, "value_heads": 2}
    tiny = replace(PRESETS["qwen3.5-mtp-tiny"], block_count=2, quant="Q8_0", **sizes)  # type: ignore[arg-type]
    path = write_synthetic(tmp_path / "tiny.gguf", tiny)

    def logits(backend: Any) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        layer, pools = DraftLayer(checkpoint, 200), [CachePool(6), CachePool(2, is_state=True)]
        cache = KVCache.allocate(checkpoint.config, 96, backend.device, pools=pools, keeps_hidden=True)
        own = KVCache.allocate(layer.config, 96, backend.device, pools=pools[:1])
        target = Decoder(checkpoint.config, checkpoint.tensors, backend, 96, 96)
        target.kept = cache.hidden
        drafts = DraftDecoder(layer.config, layer.tensors, target, 96)
        prompts, whole = [[5, 9, 200, 3], [7, 8]], [[table, [n + 1]] for n, table in enumerate(TABLES)]
        tables = [[table] for table in TABLES]
        found = []
        with torch.no_grad():
            target.forward(prefill_batch(prompts, [0, 0], whole, backend.device), cache.layers)
            found.append(drafts.forward(prefill_batch(prompts, [0, 0], tables, backend.device), own.layers))
            two = decode_batch([11, 12], [4, 2], tables, backend.device)
            found.append(drafts.forward(two, own.layers))
            one = decode_batch([13], [5], tables[:1], backend.device)
            found.append(drafts.forward(one, own.layers))
        return torch.cat([each.cpu().double() for each in found])

    ours, exact = logits(CudaBackend(device)), logits(ReferenceBackend(keep=True))
    assert ours.shape == exact.shape == (5, 256), "the output matrix's first rows alone"
    assert nmse(ours, exact) < 5e-5


def test_an_eagle_draft_model_is_the_reference(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two prompts in two chunks, a step of a row of each, one of several rows of one of them, and one row alone."""
    if device.type == "cpu":
        monkeypatch.setattr(cuda_backend, "has_dependent_launch", lambda _device: False)
    sizes = {"vocab_size": 320, "embedding_length": 64, "feed_forward_length": 64, "head_count": 2}
    sizes |= {"head_count_kv": 1, "head_dim": 32, "block_count": 3}
    small = replace(PRESETS["tiny"], quant="Q8_0", **sizes)  # type: ignore[arg-type]
    path = write_synthetic(tmp_path / "tiny.gguf", small)
    kind = Eagle(drafted=96, layers=(0, 1, 2), normed_residual=True)
    folder = kind.write(tmp_path / "draft", vocab=320)

    def logits(backend: Any) -> torch.Tensor:
        checkpoint = open_checkpoint(path)
        eagle, pools = open_eagle(folder, checkpoint), [CachePool(6)]
        assert eagle is not None and eagle.drafted is not None
        cache = KVCache.allocate(checkpoint.config, 96, backend.device, pools=pools)
        cache.keep_hidden(64, torch.float32, backend.device)
        assert cache.hidden is not None
        own = KVCache.allocate(eagle.config, 96, backend.device, pools=pools)
        target = Decoder(checkpoint.config, checkpoint.tensors, backend, 96, 96)
        target.fused = FusedRows.load(eagle.fusion.layers, eagle.fusion.tensors, cache.hidden, backend)
        drafts = EagleDecoder(eagle.config, eagle.tensors, target, eagle.drafted, 96)
        tables, found = [[table] for table in TABLES], []
        with torch.no_grad():
            fused = target.fused
            for ids, starts in (([[5, 9, 200, 3], [7, 8]], [0, 0]), ([[11], [12, 13]], [4, 2])):
                chunks, target.fused = prefill_batch(ids, starts, tables, backend.device), None
                expected = target.forward(chunks, cache.layers).clone()
                target.fused = fused
                assert torch.equal(target.forward(chunks, cache.layers), expected), "its bits stay"
            prompts = prefill_batch([[9, 200, 3, 11], [8, 12, 13]], [1, 1], tables, backend.device)
            found.append(drafts.forward(prompts, own.layers))
            for ids, positions, of in (
                ([14, 15], [5, 4], tables),
                ([11, 14, 16], [4, 5, 6], tables[:1] * 3),
                ([17], [7], tables[:1]),
            ):
                step = decode_batch(ids, positions, of, backend.device, len(ids) == 3)
                found.append(drafts.forward(step, own.layers))
        return torch.cat([each.cpu().double()[:, eagle.drafted] for each in found])

    ours, exact = logits(CudaBackend(device)), logits(ReferenceBackend(keep=True))
    assert ours.shape == exact.shape == (8, 96)
    assert nmse(ours, exact) < 5e-5
