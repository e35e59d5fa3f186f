"""The small kernels of the CPU against their torch definitions, and stages of kernels."""

import dataclasses

import pytest
import torch

from quengine.kernels import cpu
from quengine.kernels.attention import causal_mask_band, gate_output, split_gates
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu.gemv.matmul import matvec_launch, quantize_launch
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.ops.add import add_launch
from quengine.kernels.cpu.ops.glu import glu_launch
from quengine.kernels.cpu.runtime.stage import KernelStage
from quengine.kernels.cpu.runtime.threads import Program
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Activation, glu
from quengine.kernels.kv.cache_types import CacheType
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.rms_norm import rms_norm
from quengine.kernels.rope import RopeLayout, RopeSpec, rope_table
from quengine.kernels.rope_store import rope_store
from tests.forward import one_sequence
from tests.kernels.cpu.cpu_runs import embed, linear
from tests.kernels.weights import nmse, randn, random_weight


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (1, 576), (3, 33), (2, 7), (5, 4096)])
def test_rms_norm_is_its_definition(rows: int, width: int) -> None:
    x, weight = 3.0 * randn(rows, width), randn(width, seed=1)
    expected = rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-6, atol=1e-7)


def test_rms_norm_of_zeros_and_of_nan() -> None:
    weight = torch.ones(40)
    assert torch.equal(cpu.rms_norm(torch.zeros(1, 40), weight, 1e-6), torch.zeros(1, 40))
    x = torch.ones(1, 40)
    x[0, 39] = torch.nan
    assert cpu.rms_norm(x, weight, 1e-6).isnan().all()


@pytest.mark.parametrize(("rows", "width"), [(1, 96), (4, 33), (1, 1536)])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swish"])
def test_glu_is_its_definition(rows: int, width: int, activation: Activation) -> None:
    gate_up = 4.0 * randn(rows, 2 * width)
    expected = glu(gate_up.double(), activation)
    torch.testing.assert_close(cpu.glu(gate_up, activation).double(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_glu_of_extreme_gates_stays_finite_and_keeps_nan(activation: Activation) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.5, -87.0, 0.0, 88.0, 1e30, torch.nan]])
    result = cpu.glu(torch.cat([gate, torch.ones_like(gate)], 1), activation)
    expected = glu(torch.cat([gate, torch.ones_like(gate)], 1), activation)
    assert result[0, 7].isnan()
    torch.testing.assert_close(result[:, 2:7], expected[:, 2:7], rtol=1e-6, atol=1e-36)
    assert result[0, 1].abs() < 1e-35


def test_clamped_swish_of_extreme_values_is_its_definition() -> None:
    gate = torch.tensor([-1e30, -200.0, -52.0, -7.0, 0.0, 6.999, 7.0, 7.001, 1e30, torch.inf, torch.nan, 1.0])
    up = torch.tensor([-1e30, -7.001, -7.0, -1.0, 0.0, 6.999, 7.0, 7.001, 1e30, torch.inf, 1.0, torch.nan])
    gate_up = torch.cat([gate.repeat_interleave(len(up)), up.repeat(len(gate))]).unsqueeze(0)
    expected = glu(gate_up.double(), "clamped_swish")
    made = cpu.glu(gate_up, "clamped_swish").double()
    torch.testing.assert_close(made, expected, rtol=2e-6, atol=1e-7, equal_nan=True)


def test_glu_quantizes_its_result_as_quantizing_by_itself_does() -> None:
    width = 96
    gate_up, out = randn(1, 2 * width), torch.zeros(1, width)
    records, expected = torch.zeros(2, 1, quantized_row_bytes(width), dtype=torch.uint8)
    cpu.run([glu_launch(gate_up, out, records, 32)])
    cpu.run([quantize_launch(out, expected)])
    assert torch.equal(out, cpu.glu(gate_up)) and torch.equal(records, expected)


def spec_of(layout: RopeLayout, rope_dim: int, head_dim: int) -> AttentionSpec:
    cos, sin = rope_table(RopeSpec(rope_dim, layout=layout), 32)
    return AttentionSpec(
        *(4, 2, head_dim, head_dim**-0.5, None, layout, cos, sin),
        mask_band=causal_mask_band(8, 32),
        eps=1e-6,
    )


def chunk(start: int, rows: int) -> ForwardBatch:
    """Rows from a position on, in a cache of one block."""
    return one_sequence([0] * rows, start, phase="prefill", blocks=1)


@pytest.mark.parametrize("layout", ["pairs", "halves"])
@pytest.mark.parametrize(("rope_dim", "head_dim"), [(16, 16), (64, 64), (20, 40), (6, 10)])
@pytest.mark.parametrize(("rows", "start"), [(1, 0), (1, 31), (5, 9)])
@pytest.mark.parametrize("turned", [False, True])
def test_rotation_and_cache_write_have_the_bits_of_the_definition(
    layout: RopeLayout, rope_dim: int, head_dim: int, rows: int, start: int, turned: bool
) -> None:
    """turned: rows are rotated by others than their positions."""
    spec = dataclasses.replace(spec_of(layout, rope_dim, head_dim), query_scale=1.0 + torch.rand(32))
    qkv, batch = randn(rows, 8 * head_dim), chunk(start, rows)
    if turned:
        batch = dataclasses.replace(batch, angle_rows=torch.arange(rows, dtype=torch.int32) * 5 + 2)
    layers = [KVLayer(*torch.zeros(2, 32, 2, head_dim, dtype=torch.float16)) for _ in range(2)]
    expected = rope_store(qkv, spec, layers[0], batch)
    assert torch.equal(cpu.rope_store(qkv.clone(), spec, layers[1], batch), expected)
    assert torch.equal(layers[1].k, layers[0].k) and torch.equal(layers[1].v, layers[0].v)


@pytest.mark.parametrize("layout", ["pairs", "halves"])
@pytest.mark.parametrize(("rows", "start"), [(1, 31), (5, 9)])
@pytest.mark.parametrize(("cache_type", "size"), [("q8_0", 64), ("q4_0", 64), ("q4_0", 96), ("q4_0", 128)])
def test_rows_of_codes_have_the_bits_of_the_definition(
    layout: RopeLayout, rows: int, start: int, cache_type: CacheType, size: int
) -> None:
    spec = spec_of(layout, size, size)
    qkv, batch = randn(rows, 8 * size), chunk(start, rows)
    qkv[0, -size:] = 0.0  # groups of zeros have no scale
    qkv[-1, -size : 32 - size] = torch.arange(32) - 15.5  # codes that lie half way between two integers
    layers = [allocate_layer(32, 2, size, "cpu", cache_type) for _ in range(2)]
    for tensor in (*layers[0].tensors, *layers[1].tensors):
        tensor.fill_(7)
    expected = rope_store(qkv, spec, layers[0], batch)
    assert torch.equal(cpu.rope_store(qkv.clone(), spec, layers[1], batch), expected)
    for compiled, defined in zip(layers[1].tensors, layers[0].tensors, strict=True):
        assert torch.equal(compiled, defined)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("rows", "start"), [(1, 31), (5, 9)])
def test_queries_leave_the_gates_that_lie_between_them(normed: bool, rows: int, start: int) -> None:
    spec = spec_of("halves", 16, 40)
    if normed:
        spec = dataclasses.replace(spec, q_norm=randn(40, seed=1), k_norm=randn(40, seed=2))
    qkv, batch = randn(rows, 12 * 40), chunk(start, rows)
    plain, gates = split_gates(qkv, 4, 40)
    layers = [KVLayer(*torch.zeros(2, 32, 2, 40, dtype=torch.float16)) for _ in range(2)]
    expected = cpu.rope_store(plain, spec, layers[0], batch)
    gated = dataclasses.replace(spec, gated=True)
    made = qkv.clone()
    assert torch.equal(cpu.rope_store(made, gated, layers[1], batch), expected)
    assert torch.equal(layers[1].k, layers[0].k) and torch.equal(layers[1].v, layers[0].v)
    y = 3.0 * randn(rows, 160, seed=4)
    wanted = gate_output(y.double(), gates.double())
    torch.testing.assert_close(cpu.output_gate(y, made, gated).double(), wanted, rtol=1e-6, atol=1e-7)


def test_extreme_output_gates() -> None:
    spec = dataclasses.replace(spec_of("halves", 8, 8), heads=1, kv_heads=1, gated=True)
    gates = torch.tensor([-1e30, -200.0, -87.0, -1.0, 0.0, 20.0, 1e30, torch.nan])
    y = cpu.output_gate(torch.ones(1, 8), torch.cat([torch.zeros(8), gates, torch.zeros(16)])[None], spec)
    torch.testing.assert_close(y[0], gates.sigmoid(), rtol=1e-6, atol=1e-36, equal_nan=True)


def test_head_norms_come_before_the_rotation() -> None:
    norms = {"q_norm": randn(16, seed=1), "k_norm": randn(16, seed=2)}
    spec = dataclasses.replace(spec_of("halves", 16, 16), **norms)  # type: ignore[arg-type]
    qkv = randn(3, 8 * 16)
    layers = [KVLayer(*torch.zeros(2, 32, 2, 16, dtype=torch.float16)) for _ in range(2)]
    expected = rope_store(qkv, spec, layers[0], chunk(4, 3))
    torch.testing.assert_close(
        cpu.rope_store(qkv.clone(), spec, layers[1], chunk(4, 3)), expected, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(layers[1].k, layers[0].k, rtol=1e-3, atol=1e-6)
    assert torch.equal(layers[1].v, layers[0].v)


def test_values_are_stored_as_torch_rounds_to_fp16() -> None:
    # Ties, denormals, the largest, what overflows, infinities, NaN.
    special = [
        0.0,
        -0.0,
        1 + 2**-11,
        1 + 3 * 2**-11,
        2**-24,
        2**-25,
        3 * 2**-25,
        2.0**-14,
        6.1e-5,
        65504,
        65519.9,
    ]
    special += [65520.0, 1e30, torch.inf, torch.nan, 2**-26, 1e-30, 1 / 3]
    bits = torch.randint(
        -(2**31), 2**31, (64 * 16 - 2 * len(special),), generator=torch.Generator().manual_seed(0)
    )
    values = torch.cat(
        [torch.tensor(special), -torch.tensor(special), bits.to(torch.int32).view(torch.float32)]
    )
    spec = dataclasses.replace(spec_of("halves", 16, 16), heads=1, kv_heads=32)
    qkv = torch.zeros(2, 65 * 16)
    qkv[:, 33 * 16 :] = values.view(2, -1)
    layer = KVLayer(*torch.zeros(2, 32, 32, 16, dtype=torch.float16))
    cpu.rope_store(qkv, spec, layer, chunk(0, 2))
    torch.testing.assert_close(layer.v[:2].flatten(), values.half(), rtol=0, atol=0, equal_nan=True)


def test_the_cache_is_not_written_beyond_its_end() -> None:
    spec, layer = spec_of("pairs", 16, 16), KVLayer(*torch.zeros(2, 32, 2, 16, dtype=torch.float16))
    with pytest.raises(ValueError, match="positions 31 to 32 are not in a cache of 32"):
        cpu.rope_store(randn(2, 8 * 16), spec, layer, chunk(31, 2))
    with pytest.raises(ValueError, match="positions -1 to 0"):
        cpu.rope_store(randn(2, 8 * 16), spec, layer, chunk(-1, 2))


def test_a_stage_adds_in_the_tasks_and_ends_with_its_finals_every_time() -> None:
    # y = W x + b in tasks of 5 rows; the final adds y to itself once all rows are there.
    w = dataclasses.replace(random_weight("F32", 203, 64), name="w")
    x, bias = randn(1, 64), randn(203, seed=1)
    y = torch.zeros(1, 203)
    stage = KernelStage([[matvec_launch(x, w, y, 0, step=5), add_launch(y, bias, 0, 203, 5)]])
    stage.finals.append(add_launch(y, y, 0, 203, 203))
    expected = 2 * (linear(x, [w]) + bias)
    for threads in (1, cpu.max_threads()):
        cpu.set_threads(threads)
        program = Program(stage.launches())
        for _ in range(200):
            y.zero_()
            program.run()
            assert torch.equal(y, expected)


def test_the_parts_of_a_stage_share_its_finals() -> None:
    w = [random_weight("F32", rows, 32, seed=rows) for rows in (40, 8, 24)]
    x, y, total = randn(1, 32), torch.zeros(1, 72), torch.zeros(1, 72)
    parts = [[matvec_launch(x, part, y, column, step=4)] for part, column in zip(w, (0, 40, 48), strict=True)]
    stage = KernelStage(parts, [add_launch(total, y, 0, 72, 72)])
    program = Program(stage.launches())
    expected = linear(x, w)
    for count in range(1, 4):
        program.run()
        torch.testing.assert_close(total, count * expected, rtol=1e-6, atol=1e-6)


def test_a_program_may_have_fewer_tasks_in_a_later_run() -> None:
    y, ones = torch.zeros(1, 64), torch.ones(64)
    program = Program([add_launch(y, ones, 0, 64, 8)])
    program.run()
    program.set_tasks(0, 3)
    program.run()
    assert y[0].tolist() == [2.0] * 24 + [1.0] * 40


def test_nmse_of_the_rounded_matvec_is_within_the_decode_budget() -> None:
    w, x = random_weight("Q4_1", 64, 8), randn(1, 256)
    exact = x.double() @ embed(w, torch.arange(64)).double().T
    assert nmse(linear(x, [w]), exact) < 1e-8
