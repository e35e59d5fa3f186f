"""The router of a mixture of experts: norm, router matmul, selection and weights, in fp32, in one launch.

Programs share the experts of some rows: each computes the logits of a few experts, row after row. With few rows, the
last program of a row waits for the others' logits, as words (gemv/matvec_program.py), and selects its experts; with
many, a further program per row does both. A logit is summed over 512 lanes, lane j taking columns j, j + 512, ...,
then over the lanes: the order follows from the width alone, so that a row's bits are the same for any number of rows.
Defined in kernels/moe/router.py, kernels/rms_norm.py.
"""

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch, taken_words
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.router_choice import RouterConstants, choose, places
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.rms_norm import RMSNorm

_LANES = tl.constexpr(512)
_WARPS = 4

_AHEAD = 16
"""Steps of 512 columns whose weights the program of one logit loads before it waits: 4 registers each, and as
many for the row.
"""

_HELD = 16384
"""Weights that a program of many rows holds, 128 registers per thread."""

_MANY_EXPERTS = 64
"""Number of experts above which fewer programs share them."""

_FEW_LOGITS = 1024
"""Logits up to which all programs of 4 logits run at a time, whatever registers they take."""

_AT_A_TIME = 256
"""The most programs of one row each. With more rows a program takes several, and reads its weights once."""

_MOST_ROWS = 16


@dataclass(frozen=True)
class RouterProgram:
    """Compile-time constants of the kernel: a program computes the logits of `rows` rows by `experts` experts
    of `cols` columns. gate: whether there is a shared expert's gate, whose logit follows those of the `count`
    experts. apart: a separate program selects a row's experts; otherwise, with `rows` 1, the row's last program does.
    ahead: steps of 512 columns of weights held before the rows arrive; all of them with several rows.
    """

    rows: int
    experts: int
    cols: int
    count: int
    gate: bool
    apart: bool
    pdl: bool
    ahead: int

    @property
    def steps(self) -> int:
        return -(-self.cols // int(_LANES.value))

    @property
    def logits(self) -> int:
        """Logits per row."""
        return self.count + self.gate

    @property
    def blocks(self) -> int:
        """Programs that compute logits, per block of rows: the gate has its own."""
        return -(-self.count // self.experts) + self.gate

    def grid(self, rows: int) -> tuple[int, int]:
        return triton.cdiv(rows, self.rows), self.blocks + self.rows * self.apart


@triton.jit
def _columns(step, P: tl.constexpr):
    column = step * _LANES + tl.arange(0, _LANES)[None, :]
    return column, column < P.cols


@triton.jit
def _weight_step(w_ptr, norm_ptr, line, live, step, P: tl.constexpr):
    """Weights times the norm's, [experts, 512], for the columns of step `step`."""
    column, inside = _columns(step, P)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    return tl.load(w_ptr + line * P.cols + column, mask=live & inside, other=0.0) * norm


@triton.jit
def _row_step(x_ptr, row, live, step, P: tl.constexpr):
    column, inside = _columns(step, P)
    return tl.load(x_ptr + row * P.cols + column, mask=live & inside, other=0.0)


@triton.jit
def _row_steps(x_ptr, row, rows, P: tl.constexpr):
    """The first columns of a row, whose weights are held."""
    HELD: tl.constexpr = min(P.steps, P.ahead)
    x = ()
    for step in tl.static_range(HELD):
        x = x + (_row_step(x_ptr, row, row < rows, step, P),)
    return x


@triton.jit
def _logits(x_ptr, w_ptr, norm_ptr, line, live, weights, x, row, eps, P: tl.constexpr):
    """Logits [experts] of a row, normalised, by lines `line` [experts, 1] of w. weights, x: the parts already held."""
    HELD: tl.constexpr = min(P.steps, P.ahead)
    STEPS: tl.constexpr = P.steps
    acc = x[0] * weights[0]
    squares = x[0] * x[0]
    for step in tl.static_range(1, HELD):
        acc = tl.fma(tl.broadcast_to(x[step], acc.shape), weights[step], acc)
        squares = tl.fma(x[step], x[step], squares)
    for step in range(HELD, STEPS):
        more = _row_step(x_ptr, row, True, step, P)
        weight = _weight_step(w_ptr, norm_ptr, line, live, step, P)
        acc = tl.fma(tl.broadcast_to(more, acc.shape), weight, acc)
        squares = tl.fma(more, more, squares)
    return tl.sum(acc, axis=1) * tl.rsqrt(tl.sum(squares, axis=1) / P.cols + eps)


@triton.jit
def _choose_row(
    words_ptr, row, bias_ptr, selection_ptr, forced_ptr, scale_ptr, experts_ptr, weights_ptr, shared_ptr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Selects the experts of a row, once its logits are there. Only programs of lower numbers compute them, which have
    started before this one."""
    LOGITS: tl.constexpr = P.logits
    expert, real = places(C)
    logits = taken_words(words_ptr + row * LOGITS + expert, real)
    gate = logits
    if P.gate:
        gate = taken_words(words_ptr + row * LOGITS + P.count + tl.arange(0, 1), tl.arange(0, 1) == 0)
    choose(
        logits, gate, bias_ptr, selection_ptr, forced_ptr, scale_ptr, experts_ptr, weights_ptr, shared_ptr, row,
        P.gate, C,
    )  # fmt: skip


@DirectLaunch
@triton.jit
def _route_kernel(
    x_ptr, norm_ptr, w_ptr, gate_ptr, bias_ptr, selection_ptr, forced_ptr, scale_ptr, words_ptr,
    experts_ptr, weights_ptr, shared_ptr, rows, eps, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of experts), or, from the last block of experts on, (block of rows, row in it)."""
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    ROWS: tl.constexpr = P.rows
    EXPERTS: tl.constexpr = P.experts
    LOGITS: tl.constexpr = P.logits
    HELD: tl.constexpr = min(P.steps, P.ahead)
    block = tl.program_id(1)
    row0 = tl.program_id(0) * ROWS
    if P.apart and block >= P.blocks:
        mine = row0 + block - P.blocks
        if P.pdl:
            tl.extra.cuda.gdc_wait()
        if mine < rows:
            _choose_row(
                words_ptr, mine, bias_ptr, selection_ptr, forced_ptr, scale_ptr, experts_ptr, weights_ptr, shared_ptr,
                P, C,
            )  # fmt: skip
        return
    of_gate = block < 0
    if P.gate:
        of_gate = block == P.blocks - 1
        if of_gate:
            w_ptr = gate_ptr
    first = tl.where(of_gate, 0, block * EXPERTS)
    end = tl.where(of_gate, 1, P.count)
    number = first + tl.arange(0, EXPERTS)
    column = tl.where(of_gate, P.count, 0) + number
    line, live = number[:, None], (number < end)[:, None]
    weights = ()
    for step in tl.static_range(HELD):
        weights = weights + (_weight_step(w_ptr, norm_ptr, line, live, step, P),)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    x = _row_steps(x_ptr, row0, rows, P)
    for row in range(row0, tl.minimum(row0 + ROWS, rows)):
        later = x
        if ROWS > 1:
            later = _row_steps(x_ptr, row + 1, rows, P)
        y = _logits(x_ptr, w_ptr, norm_ptr, line, live, weights, x, row, eps, P)
        tl.store(words_ptr + row * LOGITS + column, y.to(tl.int32, bitcast=True), mask=number < end)
        x = later
    if not P.apart and block == P.blocks - 1:
        _choose_row(
            words_ptr, row0, bias_ptr, selection_ptr, forced_ptr, scale_ptr, experts_ptr, weights_ptr, shared_ptr, P, C
        )  # fmt: skip


def route(
    x: Tensor,
    norm: RMSNorm,
    router: Router,
    experts: Tensor | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
) -> Routing:
    """Norms fp32 rows x [T, K] and routes them, as kernels/moe/router.py defines it.

    The router's tensors are fp32. `experts`, int32 [T, k], ascending: use these, without selection. `scratch`, for
    `scratch_width` values, avoids an allocation. Raises ValueError for other shapes.
    """
    count, rows, joined = router.weight.shape[0], x.shape[0], router.joins_shared
    _check(x, norm, router, experts)
    program = _program(rows, router, pdl)
    room = QuantizationScratch.of(scratch, scratch_width(rows, router), x.device)
    made = partial(torch.empty, device=x.device)
    chosen = made(rows, router.width, dtype=torch.int32) if joined or experts is None else experts
    shared = None if joined or router.shared_gate is None else made(rows, dtype=torch.float32)
    routing = Routing(chosen, made(rows, router.width, dtype=torch.float32), shared, joined)
    constants = RouterConstants.of(router.kind, count, joined)
    _route_kernel[program.grid(rows)](
        x, norm.weight, router.weight, router.shared_gate, router.bias, router.selection_bias, experts,
        router.expert_scale, room.words, routing.experts, routing.weights, routing.shared, rows, norm.eps,
        P=program, C=constants, num_warps=_WARPS, launch_pdl=pdl,
    )  # fmt: skip
    return routing


def scratch_width(rows: int, router: Router) -> int:
    """Values of the scratch for `rows` rows: their logits."""
    return rows * (router.weight.shape[0] + 1)


def _program(rows: int, router: Router, pdl: bool) -> RouterProgram:
    count, cols = router.weight.shape
    gate = router.shared_gate is not None
    if rows == 1:
        return RouterProgram(1, 1, cols, count, gate, False, pdl, _AHEAD)
    experts = 8 if count > _MANY_EXPERTS else 4
    if rows * -(-count // experts) <= _AT_A_TIME:
        ahead = 8 if rows * count <= _FEW_LOGITS else 4 if rows <= 16 else 2
        return RouterProgram(1, experts, cols, count, gate, False, pdl, ahead)
    experts = min(8, 1 << max(0, (_HELD // cols).bit_length() - 1))
    together = 1
    while together < _MOST_ROWS and rows // together * -(-count // experts) >= _AT_A_TIME:
        together *= 2
    return RouterProgram(together, experts, cols, count, gate, True, pdl, -(-cols // int(_LANES.value)))


def _check(x: Tensor, norm: RMSNorm, router: Router, experts: Tensor | None) -> None:
    """Raises ValueError for a tensor that is not contiguous or has another shape or dtype."""
    count, cols = router.weight.shape
    rows, vector = (
        x.shape[0],
        {
            (count,): (router.bias, router.selection_bias, router.expert_scale),
            (cols,): (router.shared_gate,),
        },
    )
    wanted = [(x, (rows, cols)), (norm.weight, (cols,)), (router.weight, (count, cols))]
    wanted += [(given, shape) for shape, some in vector.items() for given in some if given is not None]
    for given, shape in wanted:
        if given.shape != shape or given.dtype != torch.float32 or not given.is_contiguous():
            raise ValueError(
                f"a router of {count} experts takes contiguous fp32 {list(shape)}, not {given.dtype} "
                f"{list(given.shape)}"
            )
    shape = (rows, router.kind.used)
    if experts is not None and (experts.shape != shape or experts.dtype != torch.int32):
        raise ValueError(
            f"forced experts must be int32 {list(shape)}, not {experts.dtype} {list(experts.shape)}"
        )
