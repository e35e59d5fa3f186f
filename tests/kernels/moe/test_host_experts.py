"""Experts in host memory beside a decoder on another device: the same logits, and weights that never leave the host."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from quengine.kernels.backend import Backend
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.moe.host_experts import HostExperts
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.tensor_split import Rank
from tests.forward import forward
from tests.transformers_models import nmse

PRESETS = ("qwen2moe-tiny", "gpt-oss-tiny")
IDS = torch.arange(3, 19) * 7


def logits(
    checkpoint: Checkpoint | SplitCheckpoint,
    backend: Backend[torch.Tensor],
    host: HostExperts | None,
    cuts: list[int],
) -> torch.Tensor:
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64, host)
    cache = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    groups = len(checkpoint.config.cache_groups)
    return torch.cat(
        [forward(decoder, IDS[a:b], cache, a, all_logits=True, groups=groups) for a, b in pairwise(cuts)]
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("cuts", [[0, 16], [0, 14, 15, 16]], ids=["prefill", "decode"])
def test_logits_do_not_depend_on_where_experts_are(tmp_path: Path, preset: str, cuts: list[int]) -> None:
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", preset))
    device = ReferenceBackend(keep=True)
    expected = logits(checkpoint, device, None, cuts)
    assert torch.equal(logits(checkpoint, device, HostExperts(device, device, 1), cuts), expected)
    packed = HostExperts(device, CpuBackend(1), checkpoint.config.block_count)
    assert nmse(logits(checkpoint, device, packed, cuts).double(), expected) < 1e-4


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_has_its_own_experts_in_host_memory(tmp_path: Path, number: int) -> None:
    """Of a model whose experts are whole on one rank each; sums are those of this rank alone."""
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", "mixtral-tiny"))
    part = SplitCheckpoint(checkpoint, Rank(number, 2, True))
    device = ReferenceBackend(keep=True)
    expected = logits(part, device, None, [0, 15, 16])
    assert torch.equal(logits(part, device, HostExperts(device, device, 1), [0, 15, 16]), expected)
    packed = HostExperts(device, CpuBackend(1), checkpoint.config.block_count)
    assert nmse(logits(part, device, packed, [0, 15, 16]).double(), expected) < 1e-4


def test_only_the_first_layers_are_computed_on_the_host(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", "mixtral-tiny"))
    device, host = ReferenceBackend(keep=True), CpuBackend(1)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, device, 64, 64, HostExperts(device, host, 1))
    kinds = [type(block.ffn.gate_up).__module__ for block in decoder.blk]
    assert kinds[0].startswith("quengine.kernels.cpu") and set(kinds[1:]) == {"quengine.kernels.reference"}
