"""Total and active parameters: those of released models, by the names of both kinds of files."""

from math import prod

import pytest

from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.parameter_counts import ParameterCounts, count_parameters, count_text
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import tensor_type
from quengine.models.tensor_table import required_tensors


def counts_of(preset: str) -> ParameterCounts:
    spec = PRESETS[preset]
    config = spec.config()
    rows = []
    for name, shape in required_tensors(config).items():
        kind = TYPE_BY_NAME[tensor_type(spec, name, shape)]
        rows.append((name, shape, kind.row_bytes(shape[-1]) * prod(shape[:-1])))
    return count_parameters(rows, config)


@pytest.mark.parametrize(
    ("preset", "total", "active", "size"),
    [
        # As their model cards have it (gpt-oss's has 3.6 B active, without its embedding); sizes of published files.
        ("mixtral-8x7b", 46.7e9, 12.9e9, 28.45e9),
        ("qwen3-30b-a3b", 30.5e9, 3.3e9, 18.56e9),
        ("gpt-oss-20b", 20.9e9, 4.2e9, 12.11e9),
    ],
)
def test_the_counts_are_those_of_released_models(
    preset: str, total: float, active: float, size: float
) -> None:
    counts = counts_of(preset)
    assert counts.parameters == pytest.approx(total, rel=0.003)
    assert counts.active_parameters == pytest.approx(active, rel=0.02)
    assert counts.nbytes == pytest.approx(size, rel=0.002)
    assert counts.active_bytes < counts.nbytes * active / total * 1.1


def test_a_dense_model_is_active_as_a_whole_but_for_the_rows_of_its_embedding() -> None:
    counts = counts_of("mistral-7b")
    assert counts.active_parameters == counts.parameters
    embedding = 32768 * 4096 // 256 * 144
    assert counts.active_bytes == counts.nbytes - embedding + 4096 // 256 * 144


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.ffn_gate_exps.weight",
        "blk.3.ffn_gate_up_exps.weight",
        "blk.3.ffn_down_exps.bias",
        "blk.3.ffn_up.7.weight",
        "model.layers.3.mlp.experts.7.gate_proj.weight",
        "model.layers.3.mlp.experts.gate_up_proj",
        "model.layers.3.mlp.experts.gate_up_proj_blocks",
        "model.layers.3.block_sparse_moe.experts.7.w1.weight",
        "model.layers.3.block_sparse_moe.input_linear.weight",
    ],
)
def test_tensors_of_experts_are_active_in_part(name: str) -> None:
    config = PRESETS["mixtral-tiny"].config()
    counts = count_parameters([(name, (8, 64), 512)], config)
    assert (counts.parameters, counts.active_parameters, counts.active_bytes) == (512, 128, 128)


@pytest.mark.parametrize(
    "name",
    [
        "blk.3.ffn_gate_inp.weight",
        "blk.3.ffn_gate_shexp.weight",
        "blk.3.ffn_down.weight",
        "model.layers.3.mlp.shared_expert.up_proj.weight",
        "model.layers.3.mlp.shared_experts.up_proj.weight",
        "model.layers.3.shared_mlp.input_linear.weight",
        "model.layers.3.mlp.gate.weight",
    ],
)
def test_routers_and_shared_experts_are_active_as_a_whole(name: str) -> None:
    counts = count_parameters([(name, (8, 64), 512)], PRESETS["mixtral-tiny"].config())
    assert counts.active_parameters == 512


def test_numbers_are_written_as_people_read_them() -> None:
    assert [count_text(n) for n in (30_532_000_000, 7_250_000, 1_500, 12)] == [
        "30.53 B",
        "7.25 M",
        "1.50 K",
        "12",
    ]
