"""A of adapters beside Hopper's matmul, and B in the launch after it, against the definition."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand, OperandLayout, to_fp16_operand
from quengine.kernels.cuda.gemm.matmul import matmul
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.launch.gpu import is_hopper
from quengine.kernels.cuda.lora import backend as lora_backend
from quengine.kernels.cuda.lora.backend import AdaptedCuda
from quengine.kernels.cuda.lora.from_rank import add_from_rank, glu_from_rank, norm_from_rank
from quengine.kernels.cuda.lora.low_rank import CudaChanges, LowRankScratch
from quengine.kernels.cuda.lora.rank_matmul import rank_matmul, takes_ranks
from quengine.kernels.cuda.lora.rank_words import rank_rows, rank_words
from quengine.kernels.cuda.weights.packed import PackedPart, pack
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.glu import Gating, glu
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import Adapters, add_changes, stacked
from quengine.kernels.rms_norm import RMSNorm, rms_norm
from tests.kernels.cuda.weights import nmse, ordinary_activations, ordinary_weight


def changes_of(parts: list[int], cols: int, ranks: list[int], device: torch.device) -> CudaChanges:
    """Of adapters of these ranks, with values of 16 bits."""
    draw = torch.Generator().manual_seed(len(parts) + cols)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=draw) * 0.25).clamp(-1, 1).mul(1024).round() / 1024

    found: list[list[LowRank | None]] = [
        [LowRank(drawn(r, cols) * 0.25, drawn(n, r), 0.5) for r in ranks] for n in parts
    ]
    return CudaChanges.of(stacked(found, parts, cols), device)


def sums_of(x: Tensor, changes: CudaChanges) -> Tensor:
    """A x, float64 [T, ranks]."""
    return x.double() @ changes.a.flatten(0, 2).double().T


def scales_of(count: int, rows: int, device: torch.device) -> Tensor:
    """Every third row has no adapter, the others one or two; none has the last."""
    scales = torch.zeros(count, rows, device=device)
    scales[0, ::3], scales[count // 2, 1::3] = 1.0, -0.5
    scales[0, 1::6] = 2.0
    scales[-1] = 0.0 if count > 2 else scales[-1]
    return scales


def test_words_are_what_lanes_hold() -> None:
    """Places as rows in the WGMMA layout have them, in blocks of 16: pair, lane of the quad, one of two."""
    a = torch.randn(48, 200).half()
    placed = Fp16Operand(torch.nn.functional.pad(a, (0, 56)), torch.ones(48)).as_wgmma().values[:48]
    split = placed.view(3, 2, 8, 2, 8, 2, 4, 2)  # tile, rh, group, chunk, block, pair, q, e
    wanted = split.permute(0, 3, 4, 5, 1, 2, 6, 7).reshape(3, 2, 32, 32, 2)
    assert torch.equal(rank_words(a).view(torch.float16).view(3, 2, 32, 32, 2), wanted)


def test_rows_of_b_are_in_the_order_of_a_normed_row() -> None:
    b = torch.randn(200, 16).half()
    found = rank_rows(b)
    assert found.shape == (16, 256)
    for n in (0, 1, 2, 16, 18, 127, 128, 199):
        p, h, e = n // 2 % 8, n // 16 % 8, n % 2
        assert torch.equal(found[:, n // 128 * 128 + p * 16 + h * 2 + e], b[n])
    assert int(found.count_nonzero()) == int(b.count_nonzero())


@pytest.mark.parametrize("rows", [1, 19, 70])
def test_b_is_added_to_a_product(rows: int, device: torch.device) -> None:
    changes, scales = changes_of([130, 8], 96, [16, 5, 20], device), scales_of(3, rows, device)
    x, y = torch.randn(rows, 96, device=device), torch.randn(rows, 138, device=device)
    wanted = add_changes(y.double(), x.double(), changes, scales)
    found = add_from_rank(y.clone(), sums_of(x, changes).float(), changes, scales)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(found[2::6], y[2::6])


@pytest.mark.parametrize("used", [[], [3], [39], [3, 35, 38], [0, 32], [31, 32, 39]])
def test_b_of_each_adapter_is_added_once(used: list[int], device: torch.device) -> None:
    """Of more adapters than a word has bits, some of whose numbers share one."""
    changes, scales = changes_of([80], 64, [20] * 40, device), torch.zeros(40, 5, device=device)
    for number, adapter in enumerate(used):
        scales[adapter, number % 4 :: 4] = 1.0 + number
    x, y = torch.randn(5, 64, device=device), torch.randn(5, 80, device=device)
    wanted = add_changes(y.double(), x.double(), changes, scales)
    found = add_from_rank(y.clone(), sums_of(x, changes).float(), changes, scales)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", [OperandLayout.ROW_MAJOR, OperandLayout.WGMMA])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_b_is_added_to_gate_and_up(activation: Gating, layout: OperandLayout, device: torch.device) -> None:
    rows, width = 19, 256
    weights = [ordinary_weight("Q4_K", width, 256) for _ in range(2)]
    part = pack(weights, device, paired=True).parts[0]
    assert isinstance(part, PackedPart)
    changes, scales = changes_of([width, width], 256, [16, 5], device), scales_of(2, rows, device)
    x = to_fp16_operand(ordinary_activations(rows, 256).to(device))
    matrices = [dequantize(w.format, w.data).reshape(w.shape).to(device) for w in weights]
    product = torch.cat([x.dequantize() @ matrix.T for matrix in matrices], 1)
    out = Fp16Operand.empty(rows, width, device, layout)
    sums = sums_of(x.dequantize(), changes).float()
    found = glu_from_rank(product.contiguous(), sums, changes, scales, activation, x, part, out)
    wanted = glu(add_changes(product.double(), x.dequantize().double(), changes, scales), activation)
    assert nmse(found.dequantize(width), wanted.cpu()) < 1e-7
    assert bool(found.values[:rows].isfinite().all())


@pytest.mark.parametrize("rows", [2, 8, 33, 64, 100])
@pytest.mark.parametrize(
    ("types", "parts", "cols", "ranks"),
    [
        (("Q4_K",), [256], 1024, [16]),
        (("Q4_K", "Q6_K"), [320, 64], 768, [4, 40, 16]),
        (("Q8_0",), [96], 1568, [16, 16]),
    ],
)
def test_a_beside_a_product(
    types: tuple[str, ...], parts: list[int], cols: int, ranks: list[int], rows: int, device: torch.device
) -> None:
    """The product has the bits that it has alone, and the sums of adapters that no row has are zero."""
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    weights = [ordinary_weight(name, n, cols) for name, n in zip(types, parts, strict=True)]
    packed, room, scratch = pack(weights, device), MatmulWorkspace(0, device), LowRankScratch(device)
    changes, scales = changes_of(parts, cols, ranks, device), scales_of(len(ranks), rows, device)
    x = to_fp16_operand(
        ordinary_activations(rows, cols).to(device), Fp16Operand.empty(rows, cols, device, room.layout(rows))
    )
    assert takes_ranks(rows, packed, changes, room)
    wanted = sums_of(x.dequantize(cols), changes).view(rows, len(parts), len(ranks), -1)
    unused = (scales == 0.0).all(1)
    wanted[:, :, unused] = 0.0
    residual = torch.randn(rows, sum(parts), device=device)
    for addend in (None, residual) if len(parts) == 1 else (None,):
        y, sums = rank_matmul(x, packed, changes, scales, room, scratch, addend)
        assert scratch.is_clear and not bool(room.scratch.arrivals.any())
        assert nmse(sums.view(wanted.shape), wanted.cpu()) < 1e-11
        assert torch.equal(y, matmul(x, packed, room, addend))


@pytest.mark.parametrize("width", [256, 200])
@pytest.mark.parametrize("rows", [1, 19])
def test_b_before_a_norm(rows: int, width: int, device: torch.device) -> None:
    if not is_hopper(device):
        pytest.skip("needs a Hopper GPU")
    changes, scales = changes_of([width], 96, [16, 5, 20], device), scales_of(3, rows, device)
    x, y = torch.randn(rows, 96, device=device), torch.randn(rows, width, device=device)
    norm = RMSNorm(torch.rand(width, device=device) + 0.5, 1e-5)
    wanted = add_changes(y.double(), x.double(), changes, scales)
    out = Fp16Operand.empty(rows, width, device, OperandLayout.WGMMA)
    norm_from_rank(y, sums_of(x, changes).float(), changes, scales, norm, out)
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-5)
    normed = rms_norm(wanted, norm.weight.double(), norm.eps)
    assert nmse(out.dequantize(width), normed.cpu()) < 1e-7


def test_factors_of_other_types_have_no_words(device: torch.device) -> None:
    changes = changes_of([32], 64, [8], device)
    fine = replace(changes, a=changes.a.float() * (1 + 2.0**-20), b=changes.b.float())
    placed = CudaChanges.of(fine, device)
    assert placed.words_of_a is None and placed.rows_of_b is None
    assert (changes.words_of_a is not None) == is_hopper(device)


def test_rows_of_output_and_down_are_converted_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no norm of the sum is computed with it, so that its launch is another."""
    converted = list[object]()

    def operand_of(x: object, *_: object) -> Fp16Operand:
        if not isinstance(x, Fp16Operand):
            converted.append(x)
        return x if isinstance(x, Fp16Operand) else Fp16Operand.empty(3, 128, device, OperandLayout.WGMMA)

    product, sums = torch.zeros(3, 32, device=device), torch.zeros(3, 16, device=device)
    monkeypatch.setattr(lora_backend, "takes_ranks", lambda *_: True)
    monkeypatch.setattr(lora_backend, "operand_of", operand_of)
    monkeypatch.setattr(lora_backend, "rank_matmul", lambda *_: (product, sums))
    monkeypatch.setattr(lora_backend, "add_from_rank", lambda y, *_: y + 1.0)
    backend, changes = AdaptedCuda(Adapters(1, {}), device), changes_of([32], 128, [16], device)
    placed, weight = backend.placed(changes), pack([ordinary_weight("Q8_0", 32, 128)], device)
    x, residual = torch.ones(3, 128, device=device), torch.zeros(3, 32, device=device)
    bias, batch = torch.ones(32, device=device), cast(ForwardBatch, SimpleNamespace(phase="decode"))
    for number, added in enumerate((None, bias), 1):
        y = backend.changed_sum(
            batch, x, weight, residual, None, added, placed, torch.ones(1, 3, device=device)
        )
        assert bool((y == number).all()) and len(converted) == number
