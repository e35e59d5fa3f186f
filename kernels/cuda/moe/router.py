"""The router of a mixture of experts: norm, router matmul, choice and weights, all fp32, for few rows in one launch.

Programs share the experts of some rows: each gives the logits of a few experts. The last one of a block of rows to
arrive chooses; where rows are many, that is a launch of its own, in which all rows are chosen for at once.
A logit is added up over 512 lanes, lane j taking columns j, j + 512, ..., then over the lanes: in an order that the
width alone decides, so that a row's bits are the same among any number of rows.
Definition: kernels/moe/router.py, kernels/rms_norm.py.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.moe.router_choice import RouterConstants, choose
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.rms_norm import RMSNorm

_LANES = tl.constexpr(512)

_WARPS = 4
"""That share the lanes; where a program has more, they share its rows, so that a logit is added up alike."""

_AHEAD = 16
"""Steps of 512 columns whose weights the program of one logit holds before it waits: 4 registers each, and as many for
the row."""

_MANY_EXPERTS = 64
"""More of them than this are shared by fewer programs."""

_FEW_ROWS = 64
"""Rows up to which there are programs of few logits, for latency, and one launch; of more, programs that read less."""

_SHARE = tl.constexpr(1 << 17)
"""Bytes that a program asks the L2 cache for."""

_FEW_LOGITS = 1024
"""Up to here programs of 4 logits all run at a time, whatever registers they take."""

_MANY_LOGITS = 8192
"""From here on programs of 8 x 8 logits are one for each multiprocessor of a large GPU: they read a quarter as much."""


@dataclass(frozen=True)
class RouterProgram:
    """A compile-time constant of the kernel: logits of `rows` rows by `experts` experts of `cols` columns a program.
    gate: there is a shared expert's gate, whose logit stands behind those of the `count` experts. chooses: the last
    program of a block of rows does. ahead: steps of 512 columns of the weights that are held before the rows come."""

    rows: int
    experts: int
    cols: int
    count: int
    gate: bool
    chooses: bool
    pdl: bool
    ahead: int
    warps: int

    @property
    def steps(self) -> int:
        return -(-self.cols // int(_LANES.value))

    @property
    def logits(self) -> int:
        """Logits of a row."""
        return self.count + self.gate

    @property
    def blocks(self) -> int:
        """Programs of a block of rows: the gate has one of its own."""
        return -(-self.count // self.experts) + self.gate


@triton.jit
def _columns(step, P: tl.constexpr):
    column = step * _LANES + tl.arange(0, _LANES)[None, None, :]
    return column, column < P.cols


@triton.jit
def _weight_step(w_ptr, norm_ptr, line, live, step, P: tl.constexpr):
    """Weights times the norm's, [1, experts, 512], columns of number `step`."""
    column, inside = _columns(step, P)
    norm = tl.load(norm_ptr + column, mask=inside, other=0.0)
    return tl.load(w_ptr + line * P.cols + column, mask=live & inside, other=0.0) * norm


@triton.jit
def _row_step(x_ptr, row, live, step, P: tl.constexpr):
    column, inside = _columns(step, P)
    return tl.load(x_ptr + row * P.cols + column, mask=live & inside, other=0.0)


@triton.jit
def _logits(x_ptr, w_ptr, norm_ptr, line, live, row, rows, eps, P: tl.constexpr):
    """Logits [rows, experts] of rows x, normed, by lines `line` [1, experts, 1] of w."""
    EARLY: tl.constexpr = min(P.steps, P.ahead)
    STEPS: tl.constexpr = P.steps
    weights = ()
    for step in tl.static_range(EARLY):
        weights = weights + (_weight_step(w_ptr, norm_ptr, line, live, step, P),)
    if P.pdl:
        tl.extra.cuda.gdc_wait()
    inside = row < rows
    x = ()
    for step in tl.static_range(EARLY):
        x = x + (_row_step(x_ptr, row, inside, step, P),)
    acc = x[0] * weights[0]
    squares = x[0] * x[0]
    for step in tl.static_range(1, EARLY):
        acc = tl.fma(tl.broadcast_to(x[step], acc.shape), tl.broadcast_to(weights[step], acc.shape), acc)
        squares = tl.fma(x[step], x[step], squares)
    for step in range(EARLY, STEPS):
        more = _row_step(x_ptr, row, inside, step, P)
        weight = _weight_step(w_ptr, norm_ptr, line, live, step, P)
        acc = tl.fma(tl.broadcast_to(more, acc.shape), tl.broadcast_to(weight, acc.shape), acc)
        squares = tl.fma(more, more, squares)
    return tl.sum(acc, axis=2) * tl.rsqrt(tl.sum(squares, axis=2) / P.cols + eps)


@triton.jit
def _prefetch_share(ptr, number, THREADS: tl.constexpr):
    """Ask the L2 cache for share `number` of what follows `ptr`."""
    if ptr is not None:
        PIECE: tl.constexpr = _SHARE // THREADS
        first = (ptr + number.to(tl.int64) * _SHARE + tl.arange(0, THREADS) * PIECE).to(tl.int64)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;",
            "=r,l,r",
            [first, tl.full([THREADS], PIECE, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@DirectLaunch
@triton.jit(do_not_specialize=["shares", "leading"])
def _route_kernel(
    x_ptr, norm_ptr, w_ptr, gate_ptr, bias_ptr, selection_ptr, forced_ptr, logits_ptr, arrivals_ptr,
    experts_ptr, weights_ptr, shared_ptr, next_ptr, rows, eps, shares, leading, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of experts): those that run at a time share weights, which the L1 cache keeps. The
    `leading` blocks of experts before the first stand for programs that prefetch `shares` shares of `next_ptr`."""
    if P.pdl:
        tl.extra.cuda.gdc_launch_dependents()
    block = tl.program_id(1) - leading
    if block < 0:
        share = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if share < shares:
            _prefetch_share(next_ptr, share, 32 * P.warps)
    else:
        _route_program(
            x_ptr, norm_ptr, w_ptr, gate_ptr, bias_ptr, selection_ptr, forced_ptr, logits_ptr, arrivals_ptr,
            experts_ptr, weights_ptr, shared_ptr, block, rows, eps, P, C,
        )  # fmt: skip


@triton.jit
def _route_program(
    x_ptr, norm_ptr, w_ptr, gate_ptr, bias_ptr, selection_ptr, forced_ptr, logits_ptr, arrivals_ptr,
    experts_ptr, weights_ptr, shared_ptr, block, rows, eps, P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The logits of a block of rows and a block of experts; of the last program, the rows' choices."""
    ROWS: tl.constexpr = P.rows
    EXPERTS: tl.constexpr = P.experts
    LOGITS: tl.constexpr = P.logits
    of_gate = block < 0
    if P.gate:
        of_gate = block == P.blocks - 1
        if of_gate:
            w_ptr = gate_ptr
    row0 = tl.program_id(0) * ROWS
    row = row0 + tl.arange(0, ROWS)[:, None, None]
    first = tl.where(of_gate, 0, block * EXPERTS)
    end = tl.where(of_gate, 1, P.count)
    line = first + tl.arange(0, EXPERTS)
    y = _logits(x_ptr, w_ptr, norm_ptr, line[None, :, None], (line < end)[None, :, None], row, rows, eps, P)
    column = (tl.where(of_gate, P.count, 0) + line)[None, :]
    at = row0 + tl.arange(0, ROWS)[:, None]
    tl.store(logits_ptr + at * LOGITS + column, y, mask=(at < rows) & (line < end)[None, :])
    if P.chooses:
        tl.debug_barrier()  # all warps' stores come before the one atomic that publishes them
        arrived = tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel", scope="gpu")
        if arrived == P.blocks - 1:
            for number in range(tl.minimum(ROWS, rows - row0)):
                choose(
                    logits_ptr, bias_ptr, selection_ptr, forced_ptr, experts_ptr, weights_ptr, shared_ptr,
                    row0 + number, LOGITS, P.gate, C,
                )  # fmt: skip
            tl.store(arrivals_ptr + tl.program_id(0), 0)


@DirectLaunch
@triton.jit
def _choose_kernel(
    logits_ptr, bias_ptr, selection_ptr, forced_ptr, experts_ptr, weights_ptr, shared_ptr,
    P: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A program a row."""
    launch_then_wait(P.pdl)
    choose(
        logits_ptr, bias_ptr, selection_ptr, forced_ptr, experts_ptr, weights_ptr, shared_ptr, tl.program_id(0),
        P.logits, P.gate, C,
    )  # fmt: skip


def route(
    x: Tensor,
    norm: RMSNorm,
    router: Router,
    experts: Tensor | None = None,
    scratch: QuantizationScratch | None = None,
    pdl: bool = False,
    soon: Tensor | None = None,
) -> Routing:
    """The routing of the norm of fp32 rows x [T, K]; see kernels/moe/router.py. Takes one launch, two of many rows.

    The router's tensors are fp32. `experts`, int32 [T, k], ascending: weighted without a choice. `scratch`, for
    `scratch_width` values, avoids an allocation. `soon`, with `pdl`: bytes that the launches behind this one will
    read, brought to the L2 cache meanwhile. Raises ValueError on other shapes.
    """
    count, rows, used = router.weight.shape[0], x.shape[0], router.kind.used
    _check(x, norm, router, experts)
    program = _program(rows, router, pdl)
    room = QuantizationScratch.of(scratch, scratch_width(rows, router), x.device)
    routing = Routing(
        torch.empty(rows, used, dtype=torch.int32, device=x.device) if experts is None else experts,
        torch.empty(rows, used, dtype=torch.float32, device=x.device),
        None if router.shared_gate is None else torch.empty(rows, dtype=torch.float32, device=x.device),
    )
    constants = RouterConstants.of(router.kind, count)
    row_blocks, shares = triton.cdiv(rows, program.rows), 0 if soon is None else soon.numel() // _SHARE.value
    leading = triton.cdiv(shares, row_blocks)
    _route_kernel[(row_blocks, leading + program.blocks)](
        x, norm.weight, router.weight, router.shared_gate, router.bias, router.selection_bias, experts, room.values,
        room.arrivals, routing.experts, routing.weights, routing.shared, soon if shares else None, rows, norm.eps,
        shares, leading, P=program, C=constants,
        num_warps=program.warps, launch_pdl=pdl,
    )  # fmt: skip
    if not program.chooses:
        _choose_kernel[(rows,)](
            room.values, router.bias, router.selection_bias, experts, routing.experts, routing.weights,
            routing.shared, P=program, C=constants, num_warps=_WARPS, launch_pdl=pdl,
        )  # fmt: skip
    return routing


def scratch_width(rows: int, router: Router) -> int:
    """Values of the scratch for so many rows: logits, and a counter for every 32 of them."""
    return rows * max(32, router.weight.shape[0] + 1)


def _program(rows: int, router: Router, pdl: bool) -> RouterProgram:
    count, cols = router.weight.shape
    gate, chooses = router.shared_gate is not None, rows <= _FEW_ROWS and rows * count < _MANY_LOGITS
    if rows == 1:
        tile, ahead, warps = (1, 1), _AHEAD, _WARPS
    elif chooses and count > _MANY_EXPERTS:
        tile, ahead, warps = (1, 8), 4 if rows <= 16 else 2, _WARPS
    elif chooses:
        tile, ahead, warps = (1, 4), 8 if rows * count <= _FEW_LOGITS else 2, _WARPS
    elif rows * count < _MANY_LOGITS:
        tile, ahead, warps = (4, 8), 1, _WARPS
    else:
        tile, ahead, warps = (8, 8), 3, 4 * _WARPS
    return RouterProgram(*tile, cols, count, gate, chooses, pdl, ahead, warps)


def _check(x: Tensor, norm: RMSNorm, router: Router, experts: Tensor | None) -> None:
    """Raises ValueError where a tensor is not contiguous and of its shape and dtype."""
    count, cols = router.weight.shape
    rows, vector = (
        x.shape[0],
        {(count,): (router.bias, router.selection_bias), (cols,): (router.shared_gate,)},
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
