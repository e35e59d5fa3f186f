"""Gate and up of a layer's experts in one tensor of a GGUF file are the matrices of two, where they lie in the file."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine import LLM
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cuda.moe.expert_weights import pack_gate_up_experts
from quengine.kernels.cuda.weights.packed import PackedPart
from quengine.models.decoder import Decoder
from quengine.models.experts import MixtureOfExperts
from quengine.models.gguf import StringArray, open_gguf
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.model_summary import summarize
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.platform.host_experts import expert_bytes
from tests.gguf_builder import GGUFBuilder
from tests.kernels.weights import nmse, random_weight

GATE_AND_UP = ("blk.*.ffn_gate_exps.weight", "blk.*.ffn_up_exps.weight")


def write_joined(source: Path, path: Path) -> Path:
    """A GGUF file with the metadata and weights of `source`, the gate's rows of every expert before those of up."""
    with open_gguf(source) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            if name.endswith("ffn_up_exps.weight"):
                continue
            shape, data = tensor.shape, tensor.data
            if name.endswith("ffn_gate_exps.weight"):
                up = file.tensors[name.replace("gate", "up")]
                assert up.type_name == tensor.type_name
                count, rows, cols = shape
                pair = [t.data.reshape(count, rows, -1) for t in (tensor, up)]
                name, shape, data = name.replace("gate", "gate_up"), (count, 2 * rows, cols), np.hstack(pair)
            builder.tensor(name, shape, tensor.type_name, data)
        return builder.write(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model in Q4_K and Q6_K, gate and up in two tensors and in one."""
    folder = tmp_path_factory.mktemp("forms")
    source = write_synthetic(folder / "two.gguf", "qwen3moe-tiny")
    return source, write_joined(source, folder / "one.gguf")


@pytest.mark.parametrize("mmap", [True, False])
def test_the_engine_computes_the_same_to_the_last_bit(files: tuple[Path, Path], mmap: bool) -> None:
    ids, logits = list(range(40)), []
    for path in files:
        with LLM(path, device="cpu", threads=1, ctx_size=64, chunk_size=16, mmap=mmap) as llm:
            logits.append((llm.logits(ids), llm.logits(ids[:8], decode=True)))
    for first, second in zip(*logits, strict=True):
        assert torch.equal(first, second)


def test_the_cpu_computes_with_the_files_own_bytes(files: tuple[Path, Path]) -> None:
    checkpoint = GGUFCheckpoint(files[1])
    decoder = Decoder(checkpoint.config, checkpoint.tensors, CpuBackend(1), 64, 64)
    for layer, block in enumerate(decoder.blk):
        stored = checkpoint.file.tensors[f"blk.{layer}.ffn_gate_up_exps.weight"].data
        start, half = stored.ctypes.data, stored.nbytes // (2 * 16)
        assert isinstance(block.ffn, MixtureOfExperts)
        for part, weights in enumerate(block.ffn.gate_up.parts):
            found = [matrix.data.data_ptr() - start for matrix in weights.matrices]
            assert found == [half * (2 * expert + part) for expert in range(16)]


def test_a_gpus_planes_are_the_same(files: tuple[Path, Path]) -> None:
    class Packing(CpuBackend):
        def gate_up_experts(self, gate: Any, up: Any, bias: Any = None) -> Any:
            return pack_gate_up_experts(gate, up, "cpu", bias)

    packed = []
    for path in files:
        checkpoint = GGUFCheckpoint(path)
        decoder = Decoder(checkpoint.config, checkpoint.tensors, Packing(1), 64, 64)
        packed.append([block.ffn.gate_up for block in decoder.blk if isinstance(block.ffn, MixtureOfExperts)])
    for first, second in zip(*packed, strict=True):
        assert first.paired and second.paired and first.nbytes == second.nbytes
        for mine, other in zip(first.parts, second.parts, strict=True):
            assert isinstance(mine, PackedPart)
            assert all(map(torch.equal, mine.planes, other.planes))


def test_parameters_and_bytes_are_counted_alike(files: tuple[Path, Path]) -> None:
    two, one = (summarize(path) for path in files)
    assert one.problem is None and one.counts == two.counts
    groups = {group.name: group for group in one.groups()}
    both = groups["blk.*.ffn_gate_up_exps.weight"]
    kinds = [group for group in two.groups() if group.name in GATE_AND_UP]
    assert both.nbytes == sum(group.nbytes for group in kinds) and len(kinds) == 2
    sizes = [expert_bytes(GGUFCheckpoint(path).tensors) for path in files]
    assert sizes[0] == sizes[1] and len(sizes[0]) == one.config.block_count  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def with_shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose shared expert has the size and formats of the others."""
    preset = synthetic_preset("qwen2moe-tiny")
    assert preset is not None
    preset = replace(preset, shared_feed_forward_length=preset.expert_feed_forward_length)
    return write_synthetic(tmp_path_factory.mktemp("shared") / "tiny.gguf", preset)


@pytest.mark.parametrize(("backend", "most"), [("reference", 1e-24), ("auto", 1e-6)])
def test_a_shared_expert_as_the_others_is_one_of_them(
    with_shared: Path, backend: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, logits = list(range(40)), []
    for joins in (True, False):
        if not joins:
            monkeypatch.setattr("quengine.models.experts._joined_shared", lambda *_: [])
        with LLM(with_shared, "cpu", backend=backend, ctx_size=64) as llm:
            mixtures = [block.ffn for block in llm.runner.decoder.blk]
            assert all(ffn.router.joins_shared == joins == (ffn.shared_entry is None) for ffn in mixtures)
            logits.append((llm.logits(ids), llm.logits(ids[:8], decode=True)))
            read = {ffn.step_bytes(1) for ffn in mixtures}
        logits[-1] += (read,)
    for joined, apart in zip(logits[0][:2], logits[1][:2], strict=True):
        assert nmse(joined, apart) < most
    assert logits[0][2] == logits[1][2]


def test_a_shared_expert_of_another_format_stays_apart(with_shared: Path) -> None:
    checkpoint = GGUFCheckpoint(with_shared)
    tensors, name = dict(checkpoint.tensors), "blk.0.ffn_down_shexp.weight"
    rows, cols = tensors[name].shape
    tensors[name] = random_weight("Q8_0", rows, cols // 32)
    first, second = Decoder(checkpoint.config, tensors, CpuBackend(1), 64, 64).blk[:2]
    assert isinstance(first.ffn, MixtureOfExperts) and isinstance(second.ffn, MixtureOfExperts)
    assert first.ffn.shared_down is not None and not first.ffn.router.joins_shared
    assert second.ffn.shared_down is None and second.ffn.router.joins_shared
