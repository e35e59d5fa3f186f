"""The kernels of LoRA adapters against their definition, for every form of the rows that they read."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, to_fp16_operand
from quengine.kernels.cuda.gemv.activations import RmsPartials, quantize_activations
from quengine.kernels.cuda.lora import low_rank as launches
from quengine.kernels.cuda.lora.embedding import add_row_changes
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch, add_low_rank
from quengine.kernels.glu import Gating, glu
from quengine.kernels.lora import low_rank as definition
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import add_changes, stacked


def changes_of(
    parts: list[int], cols: int, ranks: list[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> CudaChanges:
    """Of adapters of these ranks, of which the second leaves the last matrix as it is, with values of this type."""
    draw = torch.Generator().manual_seed(len(parts) + cols)

    tiny = 2.0**-30 if dtype == torch.bfloat16 else 1.0  # below fp16's range

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype).float()

    found: list[list[LowRank | None]] = [
        [
            None
            if number == 1 and part == len(parts) - 1
            else LowRank(drawn(r, cols) * tiny, drawn(n, r), 0.5)
            for number, r in enumerate(ranks)
        ]
        for part, n in enumerate(parts)
    ]
    return CudaChanges.of(stacked(found, parts, cols), device)


def added(
    y: torch.Tensor, x: Any, changes: CudaChanges, scales: torch.Tensor, **options: Any
) -> torch.Tensor:
    """By a launch that leaves the counters as it found them."""
    scratch = LowRankScratch(y.device)
    found = add_low_rank(y.clone(), x, changes, scales, scratch, **options)
    assert scratch.is_clear
    return found


@pytest.mark.parametrize("form", ["plain", "quantized", "norm pending", "row-major", "mma", "wgmma"])
@pytest.mark.parametrize(
    ("rows", "parts", "cols", "ranks", "fixed"),
    [
        (1, [40, 24, 24], 512, [4, 20], False),
        (19, [72], 160, [16, 8, 33], True),
        (70, [130, 8], 96, [2], False),
    ],
)
def test_kernels_are_the_definition(
    device: torch.device, form: str, rows: int, parts: list[int], cols: int, ranks: list[int], fixed: bool
) -> None:
    changes = changes_of(parts, cols, ranks, device)
    draw = torch.Generator().manual_seed(rows)
    plain = torch.randn(rows, cols, generator=draw).to(device)
    y = torch.randn(rows, sum(parts), generator=draw).to(device)
    scales = torch.randn(len(ranks), rows, generator=draw).to(device)
    scales[0, ::2] = 0.0
    scales[-1, :] = 0.0 if len(ranks) > 2 else scales[-1, :]  # none of the rows has it
    x = read = plain
    if form in ("quantized", "norm pending"):
        x = quantize_activations(plain)
        if form == "norm pending":
            x = replace(x, rms=RmsPartials(plain.square().view(rows, 2, -1).sum(2), 1e-5))
        read = x.dequantize()
    elif form != "plain":
        layout = {
            "row-major": OperandLayout.ROW_MAJOR,
            "mma": OperandLayout.MMA,
            "wgmma": OperandLayout.WGMMA,
        }
        x = to_fp16_operand(plain, Fp16Operand.empty(rows, cols, device, layout[form]))
        read = x.dequantize(cols)
    wanted = add_changes(y.double(), read.double(), changes, scales)
    found = added(y, x, changes, scales, fixed_splits=fixed)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_16_bits_are_kept_so(device: torch.device, dtype: torch.dtype) -> None:
    changes = changes_of([24, 8], 96, [4], device, dtype)
    assert changes.a.dtype == changes.b.dtype == dtype
    x, y, scales = torch.randn(2, 96), torch.randn(2, 32), torch.tensor([[1.0, -3.0]])
    scales *= 1.0 if dtype == torch.float16 else 2.0**30
    on_device = [values.to(device) for values in (x, y, scales)]
    wanted = add_changes(*(values.double() for values in (on_device[1], on_device[0])), changes, on_device[2])
    found = added(on_device[1], on_device[0], changes, on_device[2])
    assert float((wanted - on_device[1]).abs().max()) > 1.0
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [2, 70])
def test_gated_units_of_a_changed_product(device: torch.device, rows: int, activation: Gating) -> None:
    changes = changes_of([72, 72], 320, [16, 3], device)
    draw, shapes = torch.Generator().manual_seed(rows), ((rows, 320), (rows, 144), (2, rows))
    x, y, scales = (torch.randn(shape, generator=draw).to(device) for shape in shapes)
    scales[:, -1] = 0.0
    wanted = glu(add_changes(y.double(), x.double(), changes, scales), activation)
    found = added(y, x, changes, scales, activation=activation)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max()))


def test_rows_that_are_read_of_a_changed_matrix(device: torch.device) -> None:
    changes = changes_of([50], 300, [16, 20], device)
    ids, x = torch.tensor([3, 49, 0, 3], device=device), torch.randn(4, 300, device=device)
    scales = torch.randn(2, 4, device=device)
    scales[:, 1] = 0.0
    wanted = definition.add_row_changes(x.double(), ids, changes, scales, 2.5)
    found = add_row_changes(x.clone(), ids, changes, scales, 2.5)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-4)
    assert torch.equal(found[1], x[1])


def test_rows_without_adapters_keep_their_bits(device: torch.device) -> None:
    changes = changes_of([32], 64, [8], device)
    y, scales = torch.randn(3, 32, device=device), torch.zeros(1, 3, device=device)
    x = torch.randn(3, 64, device=device)
    assert torch.equal(added(y, x, changes, scales), y)
    scales[0, 1] = 1.0
    found = added(y, x, changes, scales)
    assert torch.equal(found[::2], y[::2]) and not torch.equal(found[1], y[1])


@pytest.mark.parametrize("halves", [False, True])
def test_a_row_has_the_bits_that_it_has_in_any_batch(device: torch.device, halves: bool) -> None:
    """halves: of factors of 16 bits, whose products another instruction may add where a program has 64 rows."""
    changes = changes_of([48], 320, [16, 4], device, torch.float16 if halves else torch.float32)
    x, y = torch.randn(80, 320, device=device), torch.randn(80, 48, device=device)
    scales = torch.randn(2, 80, device=device)

    def computed(count: int) -> torch.Tensor:
        own, rows = scales[:, :count].contiguous(), x[:count]
        read = to_fp16_operand(rows.contiguous()) if halves else rows
        return added(y[:count], read, changes, own, fixed_splits=True)

    assert torch.equal(computed(5), computed(80)[:5])


def test_more_values_of_a_than_int32_counts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of many adapters, of the last of three matrices: only its values are written, and read."""
    if device.type == "cpu":  # the interpreter takes as long for a pass of many columns as for one of few
        monkeypatch.setattr(launches, "_COLUMNS", 4096)
    parts, cols, count = (16, 16, 16), 262144, 175
    a = torch.empty(len(parts), count, 16, cols, dtype=torch.float16, device=device)
    assert a.numel() - 16 * cols > 2**31
    b = torch.zeros(sum(parts), count, 16, dtype=torch.float16, device=device)
    a[-1, -1], b[:, -1] = 2.0**-10, 1.0
    a[:-1, -1] = 0.0
    like = changes_of(list(parts), 64, [16], device)
    changes = replace(like, a=a, b=b)
    scales = torch.zeros(count, 1, device=device)
    scales[-1] = 2.0
    y, x = torch.zeros(1, sum(parts), device=device), torch.ones(1, cols, device=device)
    found = added(y, x, changes, scales, fixed_splits=True)
    assert found[0].tolist() == [0.0] * 32 + [2.0 * 16 * cols * 2.0**-10] * 16
