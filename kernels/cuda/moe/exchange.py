"""The device's side of an exchange of rows with the host (kernels/moe/exchange.py): sending rows, and adding the sums
that the host has made of them.

`send_rows` writes rows to host memory by ordinary stores; the last program of its launch to finish counts them as sent,
after a fence for the whole system. `add_sums` polls the host's count, and then reads the sums where they lie.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quengine.kernels.cuda.gemm.mma import uses_assembly
from quengine.kernels.cuda.launch.kernel import DirectLaunch
from quengine.kernels.cuda.pdl import launch_then_wait
from quengine.kernels.moe.exchange import Exchange
from quengine.kernels.moe.held_experts import HeldExperts
from quengine.kernels.moe.router import Routing

MOST_POLLS = 1 << 25
"""Reads of the host's count, each 1 us or more, after which the device gives up these sums and those of later layers:
half a minute."""

_COLUMNS = 2048


@triton.jit
def _system_fence(x, ASM: tl.constexpr):
    """x, once what this thread has written is visible to the host, and what it reads next is no older."""
    if ASM:
        x = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    return x


@DirectLaunch
@triton.jit
def _send_rows_kernel(
    x_ptr, experts_ptr, weights_ptr, positions_ptr, places_ptr, uses_ptr, out_ptr, out_experts_ptr, out_weights_ptr,
    out_places_ptr, sent_ptr, launches_ptr, K, held,
    USED: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program a row. Of an expert on the device the host gets -1, and `out_places` its place there. Uses of
    experts are counted, but for rows at position 0, as padding rows are."""
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)
    inside, pair = slot < USED, row * USED + slot
    expert = tl.load(experts_ptr + pair, mask=inside, other=0)
    tl.store(out_weights_ptr + pair, tl.load(weights_ptr + pair, mask=inside, other=0.0), mask=inside)
    if places_ptr is not None:
        place = tl.load(places_ptr + expert, mask=inside, other=0)
        tl.store(out_places_ptr + pair, place, mask=inside)
        counted = inside & (tl.load(positions_ptr + row) > 0)
        tl.atomic_add(uses_ptr + expert, 1, mask=counted, sem="relaxed")
        expert = tl.where(place < held, -1, expert)
    tl.store(out_experts_ptr + pair, expert, mask=inside)
    for start in range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        value = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0)
        tl.store(out_ptr + row * K + column, value, mask=column < K)
    _system_fence(tl.arange(0, 32 * WARPS), ASM)
    tl.debug_barrier()
    if tl.atomic_add(launches_ptr + 1, 1) == tl.num_programs(0) - 1:
        number = tl.load(launches_ptr, volatile=True) + 1
        tl.store(launches_ptr, number)
        tl.store(launches_ptr + 1, 0)
        _system_fence(tl.arange(0, 32 * WARPS), ASM)
        tl.debug_barrier()
        tl.store(sent_ptr, number)


@DirectLaunch
@triton.jit
def _add_sums_kernel(
    residual_ptr, sums_ptr, summed_ptr, given_up_ptr, launches_ptr, K,
    COLUMNS: tl.constexpr, POLLS: tl.constexpr, WARPS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a row, which becomes NaN where the host's sums do not come."""
    launch_then_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(launches_ptr, volatile=True)
    late = tl.load(summed_ptr, volatile=True) < number
    polls = 0
    while late & (polls < POLLS):
        given_up = tl.load(given_up_ptr, volatile=True) != 0
        late = tl.load(summed_ptr, volatile=True) < number
        polls = tl.where(given_up, POLLS, polls + 1)
    if late:
        tl.store(given_up_ptr, 1)
    _system_fence(tl.arange(0, 32 * WARPS), ASM)
    tl.debug_barrier()
    for start in range(0, K, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < K
        value = tl.load(sums_ptr + row * K + column, mask=inside, other=0.0, volatile=True)
        value += tl.load(residual_ptr + row * K + column, mask=inside, other=0.0)
        tl.store(residual_ptr + row * K + column, tl.where(late, float("nan"), value), mask=inside)


def send_rows(
    x: Tensor,
    routing: Routing,
    positions: Tensor,
    held: HeldExperts | None,
    exchange: Exchange,
    pdl: bool = False,
) -> Tensor | None:
    """Sends rows fp32 [T, K] with their routing to the host. Returns the places of their experts on the device, int32
    [T, k], `held.count` for one that is not there; without `held` None. Raises ValueError for more rows than fit.
    """
    (rows, width), (_, used) = x.shape, routing.experts.shape
    if rows > exchange.capacity or (width, used) != (exchange.rows.shape[1], exchange.experts.shape[1]):
        raise ValueError(
            f"{rows} rows of {width} with {used} experts each; the exchange has room for {list(exchange.rows.shape)} "
            f"with {exchange.experts.shape[1]}"
        )
    assert x.is_contiguous() and routing.experts.is_contiguous() and routing.weights.is_contiguous()
    places = None if held is None else torch.empty_like(routing.experts)
    _send_rows_kernel[(rows,)](
        x, routing.experts, routing.weights, positions, None if held is None else held.places,
        None if held is None else held.uses, exchange.rows, exchange.experts, exchange.weights, places, exchange.sent,
        exchange.launches, width, 0 if held is None else held.count,
        USED=used, SLOTS=triton.next_power_of_2(used), COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)), WARPS=4,
        ASM=uses_assembly(), PDL=pdl, num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return places


def add_sums(residual: Tensor, exchange: Exchange, pdl: bool = False, polls: int = MOST_POLLS) -> Tensor:
    """Waits for the host's sums of the rows sent last, and adds them to `residual`, contiguous fp32 [T, K], in place.
    Rows without sums after `polls` reads become NaN; once that has happened, later launches do not wait.
    """
    rows, width = residual.shape
    assert residual.is_contiguous() and width == exchange.sums.shape[1] and rows <= exchange.capacity
    _add_sums_kernel[(rows,)](
        residual, exchange.sums, exchange.summed, exchange.given_up, exchange.launches, width,
        COLUMNS=min(_COLUMNS, triton.next_power_of_2(width)), POLLS=polls, WARPS=4, ASM=uses_assembly(), PDL=pdl,
        num_warps=4, launch_pdl=pdl,
    )  # fmt: skip
    return residual
