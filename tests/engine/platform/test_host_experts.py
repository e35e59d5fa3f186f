"""Which experts stay in host memory, and what is said where neither memory holds them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.config import EngineConfig
from quengine.errors import CannotRunError, EngineError
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.moe.router_kind import RouterKind
from quengine.kernels.quant_tensor import QuantTensor
from quengine.memory import layers_that_free
from quengine.models.blocks.experts import ExpertConfig
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import ModelConfig
from quengine.platform.host_experts import ExpertPlacement, expert_bytes, host_layers, split_tensors
from tests.tiny_models import write_tiny


def tensor(name: str, rows: int) -> QuantTensor:
    return QuantTensor(name, FORMATS["F32"], (rows, 8), torch.zeros(rows, 32, dtype=torch.uint8))


NAMES = {
    "token_embd.weight": 10,
    "blk.0.ffn_gate.weight": 4,
    "blk.0.ffn_gate_inp.weight": 4,
    "blk.1.ffn_gate_exps.weight": 8,
    "blk.1.ffn_down_exps.bias": 2,
    "blk.1.ffn_gate_shexp.weight": 4,
    "blk.2.ffn_up.0.weight": 3,
    "blk.2.ffn_up.11.weight": 3,
    "blk.3.ffn_gate_up_exps.weight": 16,
}
TENSORS = {name: tensor(name, rows) for name, rows in NAMES.items()}


@pytest.fixture
def dense(tmp_path: Path) -> ModelConfig:
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf"))
    checkpoint.close()
    return checkpoint.config


def test_experts_are_counted_by_layer_and_nothing_else_is() -> None:
    assert expert_bytes(TENSORS) == {1: 10 * 32, 2: 6 * 32, 3: 16 * 32}


def test_the_first_layers_experts_stay_on_the_host() -> None:
    host, rest = split_tensors(TENSORS, 2)
    assert list(host) == ["blk.1.ffn_gate_exps.weight", "blk.1.ffn_down_exps.bias"]
    assert {**host, **rest} == TENSORS and not host.keys() & rest.keys()
    assert split_tensors(TENSORS, 0) == ({}, TENSORS)
    assert [len(split_tensors(TENSORS, layers)[0]) for layers in (3, 4)] == [4, 5]


@pytest.mark.parametrize(("missing", "layers"), [(320, 2), (321, 3), (512, 3), (513, None)])
def test_the_fewest_layers_that_make_room(missing: int, layers: int | None) -> None:
    assert layers_that_free({1: 320, 2: 192}, missing) == layers


def test_layers_follow_the_flags(dense: ModelConfig) -> None:
    experts = ExpertConfig(4, RouterKind(used=2), 32)
    mixture = dataclasses.replace(dense, experts=experts, block_count=5)
    assert host_layers(EngineConfig(), mixture) == 0
    assert host_layers(EngineConfig(n_cpu_moe=3), mixture) == 3
    assert host_layers(EngineConfig(n_cpu_moe=99), mixture) == 5
    assert host_layers(EngineConfig(cpu_moe=True), mixture) == 5
    with pytest.raises(EngineError, match=r"--n-cpu-moe 3: llama model .* has no experts; leave it out"):
        host_layers(EngineConfig(n_cpu_moe=3), dense)
    with pytest.raises(EngineError, match="--cpu-moe: "):
        host_layers(EngineConfig(cpu_moe=True), dense)
    with pytest.raises(EngineError, match=r"--expert-parallel: llama model .* has no experts"):
        host_layers(EngineConfig(expert_parallel=True), dense)
    assert host_layers(EngineConfig(expert_parallel=True), mixture) == 0


def test_host_memory_that_is_too_small_is_refused_with_numbers() -> None:
    ExpertPlacement(1, {0: 100, 1: 50}).check_host_memory(100)
    with pytest.raises(
        CannotRunError, match=r"first 7 layers need 2\.00 GiB, free 1\.00 GiB; lower --n-cpu-moe"
    ):
        ExpertPlacement(7, {3: 1 << 30, 6: 1 << 30, 7: 1 << 30}).check_host_memory(1 << 30)


PLACED = ExpertPlacement(2, {0: 3200, 1: 6400, 2: 6400}, 0, 32)
"""Two layers of three, with 32 experts of 300 bytes together."""


@pytest.mark.parametrize(
    ("options", "room", "held", "streams"),
    [
        ({}, 0, 0, False),
        ({}, 309 * 4, 4, False),
        ({}, 309 * 4 - 1, 0, False),
        ({}, 25999, 32, False),
        ({}, 26000, 32, True),
        ({"gpu_experts": 5}, 0, 5, False),
        ({"gpu_experts": 5}, 13000 + 309 * 5, 5, True),
        ({"gpu_experts": 99}, 309 * 32, 32, False),
        ({"gpu_experts": 0}, 13000, 0, True),
        ({"deterministic": True}, 1 << 20, 0, False),
    ],
    ids=lambda value: str(value),
)
def test_experts_on_the_device_follow_options_and_room(
    options: dict[str, Any], room: int, held: int, streams: bool
) -> None:
    placed = PLACED.holding(EngineConfig(cpu_moe=True, **options), 4, room)
    assert (placed.held, placed.streams) == (held, streams)
    assert placed.shared_bytes == 309 * held + (13000 if streams else 0)


def test_experts_of_models_without_a_place_in_host_memory_are_left_alone() -> None:
    assert ExpertPlacement(0, PLACED.sizes, 0, 32).holding(EngineConfig(), 4, 1 << 20).held == 0


def test_the_note_says_how_many_the_device_holds() -> None:
    note = dataclasses.replace(PLACED, held=5).note()
    assert note == (
        "experts of 2 of 3 layers, 0.0 MiB, stay in host memory; the CPU computes them, but for the 5 of each layer "
        "used most, which the GPU holds"
    )
    assert (
        dataclasses.replace(PLACED, held=32)
        .note()
        .endswith("steps are faster without --cpu-moe and --n-cpu-moe")
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "gpu_experts 3: no experts are in host memory, so the GPU has all; request it with --cpu-moe"),
        (
            {"cpu_moe": True, "deterministic": True},
            "gpu_experts 3: with --deterministic a row's bits may not",
        ),
        ({"cpu_moe": True, "tensor_parallel": 2}, "gpu_experts 3: 2 devices share the model"),
    ],
)
def test_experts_on_the_device_are_refused_where_they_have_no_meaning(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(EngineError, match=problem):
        EngineConfig(gpu_experts=3, **options)
