"""CPU matmuls and embeddings on weights as stored, against the torch definitions."""

import pytest
import torch
from torch import Tensor

from quengine.kernels.activations import quantize_activations
from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.cpu import prompt_linear, set_threads
from quengine.kernels.cpu.gemm.amx import has_amx
from quengine.kernels.cpu.gemm.amx_bytes import uses_amx_bytes
from quengine.kernels.cpu.gemm.vnni import uses_vnni
from quengine.kernels.cpu.gemv import matmul
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.runtime.target import host_tile
from quengine.kernels.cpu.runtime.threads import max_threads, run
from quengine.kernels.q_dot import q_dot
from quengine.kernels.quant_tensor import QuantTensor
from tests.kernels.cpu.cpu_runs import decode_linear, embed, linear
from tests.kernels.weights import nmse, random_weight

QUANTIZED = [name for name, fmt in FORMATS.items() if fmt.is_quantized]
MANY = max_threads()


def activations(rows: int, cols: int, seed: int = 3) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def with_threads(threads: int, x: Tensor, *parts: QuantTensor) -> Tensor:
    set_threads(threads)
    return linear(x, parts)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (37, 5)])
def test_decode_is_q_dot(name: str, rows: int, blocks: int) -> None:
    w = random_weight(name, rows, blocks)
    x = activations(3, w.cols)
    groups = unpack(w.format, w.data)
    exact = q_dot(quantize_activations(x), groups, torch.float64)
    y = linear(x, [w])
    # A single row's sum may nearly cancel: measured against the size of its terms.
    size = (
        (quantize_activations(x).values().abs() @ dequantize(w.format, w.data).abs().double().T)
        .square()
        .sum()
    )
    assert float((y.double() - exact).square().sum()) <= 1e-13 * float(size)
    if rows > 1:
        assert nmse(y, exact) <= 1e-11
        assert nmse(y, x.double() @ dequantize(w.format, w.data).double().T) <= 1e-8


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("cols", [1, 31, 200])
def test_decode_of_float_weights_rounds_nothing(name: str, cols: int) -> None:
    w = random_weight(name, 19, cols)
    x = activations(2, cols)
    assert nmse(linear(x, [w]), x.double() @ dequantize(w.format, w.data).double().T) <= 1e-12


@pytest.mark.parametrize("name", FORMATS)
def test_decode_is_the_same_for_any_threads_and_batch(name: str) -> None:
    blocks = 320 // FORMATS[name].block * 2 or 2
    w = random_weight(name, 300, blocks)
    x = activations(3, w.cols)
    alone = torch.cat([with_threads(1, row.unsqueeze(0), w) for row in x])
    assert torch.equal(with_threads(1, x, w), alone)
    assert torch.equal(with_threads(MANY, x, w), alone)


@pytest.mark.parametrize("name", [*FORMATS])
def test_decode_of_more_rows_than_one_pass_takes(name: str) -> None:
    # 16 rows share a pass; the widths leave whole turns of 256 weights, pairs of groups of 32 and a lone one.
    fmt = FORMATS[name]
    w = random_weight(name, 40, max(1, 352 // fmt.block))
    x = activations(19, w.cols)
    y = decode_linear(x, [w])
    assert torch.equal(y, torch.cat([linear(row.unsqueeze(0), [w]) for row in x]))


@pytest.mark.parametrize("batch", [2, 70])
def test_parts_of_different_types_lie_side_by_side(batch: int) -> None:
    parts = [random_weight("Q4_K", 9, 2), random_weight("F16", 5, 512), random_weight("Q6_K", 7, 2)]
    x = activations(batch, 512)
    y = linear(x, parts)
    assert y.shape == (batch, 21)
    assert torch.equal(y, torch.cat([linear(x, [part]) for part in parts], dim=1))


@pytest.mark.parametrize("name", FORMATS)
def test_prefill_multiplies_in_fp32(name: str) -> None:
    """Or nearly: on AMX an operand is two bytes (test_cpu_amx_bytes.py) or two bf16 (test_cpu_amx.py), among int16 it
    has 15 bits (test_cpu_vnni.py)."""
    w = random_weight(name, 77, max(1, 512 // FORMATS[name].block))
    x = activations(33, w.cols)
    y = linear(x, [w])
    others = 2e-9 if has_amx() else 1e-8 if uses_vnni(w) else 1e-12
    most = 2e-8 if uses_amx_bytes(w) else others
    assert nmse(y, x.double() @ dequantize(w.format, w.data).double().T) <= most


@pytest.mark.parametrize(("name", "cols"), [("Q5_K", 768), ("Q4_1", 576), ("F16", 300)])
def test_prefill_is_the_same_for_any_threads_and_rows_beside(name: str, cols: int) -> None:
    w = random_weight(name, 203, cols // FORMATS[name].block)
    x = activations(40, w.cols)
    y = with_threads(1, x, w)
    assert torch.equal(with_threads(MANY, x, w), y)
    for rows in (slice(0, 1), slice(3, 27), slice(33, 40)):
        assert torch.equal(prompt_linear(x[rows], [w]), y[rows])


@pytest.mark.parametrize("rows", [2, 24, 29])
def test_an_addend_is_of_one_row_or_of_all(rows: int) -> None:
    parts = [random_weight("Q4_K", 70, 2), random_weight("F16", 5, 512)]
    x, residual = activations(rows, 512), activations(rows, 75, seed=4)
    y = prompt_linear(x, parts).double()
    assert nmse(prompt_linear(x, parts, residual), y + residual) <= 1e-11
    assert nmse(prompt_linear(x, parts, residual[:1]), y + residual[:1]) <= 1e-11


@pytest.mark.parametrize("name", FORMATS)
def test_embedding_rows_are_the_weights(name: str) -> None:
    w = random_weight(name, 11, 3)
    ids = torch.tensor([10, 0, 3, 3])
    assert torch.equal(embed(w, ids), dequantize(w.format, w.data)[ids])


def test_embedding_of_no_tokens_and_of_impossible_ones() -> None:
    w = random_weight("Q8_0", 11, 2)
    assert embed(w, torch.zeros(0, dtype=torch.int64)).shape == (0, 64)
    for bad in (-1, 11):
        with pytest.raises(ValueError, match="rows 0 to 10"):
            embed(w, torch.tensor([bad]))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-40, 1e30])
def test_rounding_is_the_definition_to_the_bit(scale: float) -> None:
    x = activations(4, 160) * scale
    x[0, :32] = 0.0
    x[1, 5] = 0.5 * x[1, 4]
    records = torch.zeros(4, quantized_row_bytes(160), dtype=torch.uint8)
    run([matmul.quantize_launch(x, records)])
    expected = quantize_activations(x)
    assert torch.equal(activation_plane(records, 160), expected.a)
    if host_tile().byte_dot_lanes:
        for group, start, stop in ((16, 320, 360), (32, 360, 380)):
            ints = records[:, start:stop].contiguous().view(torch.int32)
            assert torch.equal(ints, -32 * expected.a.view(4, -1, group).sum(-1, dtype=torch.int32))
    assert torch.equal(records[:, 380:400].contiguous().view(torch.float32), expected.t)
    for group, start, stop in ((32, 400, 420), (16, 420, 460)):
        sums = records[:, start:stop].contiguous().view(torch.float32)
        t = expected.t.repeat_interleave(32 // group, dim=1)
        assert torch.equal(sums, t * expected.sums(group))


def activation_plane(records: Tensor, cols: int) -> Tensor:
    """The integers in quantized activations, int16 [T, K]; K is an odd number of groups of 32."""
    if host_tile().byte_dot_lanes:
        high, low = records[:, : 2 * cols].view(torch.int8).view(-1, 2, cols).to(torch.int16).unbind(1)
        return 256 * high + low
    # Of two groups of 32 at a time, of the last one alone, the even and then the odd places.
    a = records[:, : 2 * cols].contiguous().view(torch.int16)
    pairs = a[:, :-32].reshape(len(a), -1, 2, 32).transpose(2, 3).reshape(len(a), -1)
    last = a[:, -32:].reshape(len(a), 2, 16).transpose(1, 2).reshape(len(a), 32)
    return torch.cat([pairs, last], 1)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["Q4_K", "Q8_0"])
def test_what_is_not_finite_reaches_the_result(name: str, bad: float) -> None:
    w = random_weight(name, 3, 2)
    x = activations(2, w.cols)
    x[1, 7] = bad
    y = linear(x, [w])
    assert torch.isfinite(y[0]).all() and not torch.isfinite(y[1]).any()


def test_swapped_nibbles_are_noticed() -> None:
    w = random_weight("Q4_1", 16, 4)
    blocks = w.data.clone().view(16, 4, 20)
    blocks[..., 4:] = (blocks[..., 4:] >> 4) | (blocks[..., 4:] << 4)
    swapped = QuantTensor("swapped", w.format, w.shape, blocks.view(16, -1))
    x = activations(1, w.cols)
    assert nmse(linear(x, [swapped]), x.double() @ dequantize(w.format, w.data).double().T) > 1e-2


def test_weights_are_read_at_any_alignment() -> None:
    w = random_weight("Q6_K", 6, 2)
    memory = torch.zeros(w.nbytes + 1, dtype=torch.uint8)
    memory[1:] = w.data.flatten()
    shifted = QuantTensor("shifted", w.format, w.shape, memory[1:].view(6, -1))
    x = activations(1, w.cols)
    assert torch.equal(linear(x, [shifted]), linear(x, [w]))


def test_widths_must_agree() -> None:
    with pytest.raises(ValueError, match="width 64"):
        linear(activations(1, 96), [random_weight("Q8_0", 3, 2)])
