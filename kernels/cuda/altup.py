"""Alternating updates on CUDA: a token's rows predicted, and corrected, in a launch each; the rest is torch's.

Defined in kernels/altup.py. A program takes a token, so that no sum depends on the others.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.altup_operations import AltUpOperations, AltUpSpec
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import wait_then_launch
from quengine.kernels.cuda.softcap import soft_capped
from quengine.kernels.forward_batch import ForwardBatch


@triton.jit
def _begin(
    row_ptr, norm_ptr, router_ptr, eps,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program's token: its row at row_ptr [T, W], the columns, which of them exist, their offset in a row of the
    token, the numbers of rows [PLACES], which of them exist, and for each tanh of the normed row times the router's.
    """
    wait_then_launch(PDL)
    column, k = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    inside, among = column < WIDTH, k < COUNT
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(row_ptr + at, mask=inside, other=0.0)
    root = tl.rsqrt(tl.sum(row * row, 0) / WIDTH + eps)
    normed = row * root * tl.load(norm_ptr + column, mask=inside, other=0.0)
    found = tl.zeros_like(k.to(tl.float32))
    for n in tl.static_range(COUNT):
        product = tl.sum(normed * tl.load(router_ptr + n * WIDTH + column, mask=inside, other=0.0), 0)
        found = tl.where(k == n, product, found)
    return row, column, inside, at, k, among, soft_capped(found, 1.0)


@DirectLaunch
@triton.jit(do_not_specialize=["stream"])
def _predict_kernel(
    x_ptr, norm_ptr, router_ptr, coefficient_ptr, out_ptr, first_ptr, stream, eps,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token,). stream: elements from one of a token's rows to the next. PLACES: COUNT as a power of two."""
    _, _, inside, at, k, among, modalities = _begin(
        x_ptr, norm_ptr, router_ptr, eps, WIDTH, COUNT, PLACES, BLOCK, PDL
    )
    for n in tl.static_range(COUNT):
        total = tl.load(x_ptr + n * stream + at, mask=inside, other=0.0)
        for other in tl.static_range(COUNT):
            of_pair = tl.load(coefficient_ptr + (n * COUNT + other) * COUNT + k, mask=among, other=0.0)
            weight = tl.sum(modalities * of_pair, 0)
            total += weight * tl.load(x_ptr + other * stream + at, mask=inside, other=0.0)
        tl.store(out_ptr + n * stream + at, total, mask=inside)
        if n == 0:
            tl.store(first_ptr + at, total, mask=inside)


@DirectLaunch
@triton.jit(do_not_specialize=["stream"])
def _correct_kernel(
    x_ptr, y_ptr, norm_ptr, router_ptr, coefficient_ptr, scale_ptr, out_ptr, scaled_ptr, stream, eps,
    WIDTH: tl.constexpr, COUNT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs (token,), otherwise as `_predict_kernel`."""
    row, column, inside, at, k, among, modalities = _begin(
        y_ptr, norm_ptr, router_ptr, eps, WIDTH, COUNT, PLACES, BLOCK, PDL
    )
    change = row - tl.load(x_ptr + at, mask=inside, other=0.0)
    for n in tl.static_range(COUNT):
        weight = 1.0 + tl.sum(modalities * tl.load(coefficient_ptr + n * COUNT + k, mask=among, other=0.0), 0)
        found = tl.load(x_ptr + n * stream + at, mask=inside, other=0.0) + weight * change
        tl.store(out_ptr + n * stream + at, found, mask=inside)
        if n == 0:
            scale = tl.load(scale_ptr + column, mask=inside, other=0.0)
            tl.store(scaled_ptr + at, found * scale, mask=inside)


def predict(x: Tensor, spec: AltUpSpec, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Predicts a layer's results from the rows before it, x fp32 [N, T, W]. Returns the predictions [N, T, W], and the
    first one, [T, W]."""
    x = x.contiguous()
    out, first = torch.empty_like(x), torch.empty_like(x[0])
    _predict_kernel[(x.shape[1],)](
        x,
        spec.norm.weight,
        spec.router,
        spec.predict,
        out,
        first,
        x.stride(0),
        spec.norm.eps,
        **_shape(x, pdl),
    )
    return out, first


def correct(x: Tensor, y: Tensor, spec: AltUpSpec, pdl: bool = False) -> tuple[Tensor, Tensor]:
    """Corrects predictions x fp32 [N, T, W] by the layer's result y [T, W]. Returns the corrected rows [N, T, W], and
    the first one scaled, [T, W]."""
    x, y = x.contiguous(), y.contiguous()
    out, scaled = torch.empty_like(x), torch.empty_like(y)
    _correct_kernel[(x.shape[1],)](
        x, y, spec.norm.weight, spec.router, spec.correct, spec.scale, out, scaled, x.stride(0), spec.norm.eps,
        **_shape(x, pdl),
    )  # fmt: skip
    return out, scaled


def _shape(x: Tensor, pdl: bool) -> dict[str, Any]:
    count, _, width = x.shape
    places, block = (int(triton.next_power_of_2(size)) for size in (count, width))
    return {
        "WIDTH": width,
        "COUNT": count,
        "PLACES": places,
        "BLOCK": block,
        "PDL": pdl,
        "num_warps": max(1, min(8, block // 256)),
        "launch_pdl": pdl,
    }


class CudaAltUp(AltUpOperations):
    """See `AltUpOperations`."""

    def predicted(self, _batch: ForwardBatch, x: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        return predict(x, spec, self._backend.pdl)

    def corrected(self, _batch: ForwardBatch, x: Tensor, y: Tensor, spec: AltUpSpec) -> tuple[Tensor, Tensor]:
        return correct(x, y, spec, self._backend.pdl)
