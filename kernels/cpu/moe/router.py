"""The router on the CPU, compiled: as defined in kernels/moe/router.py.

The logits are fp32 dot products of a row and an expert's router weights, summed in an order set by the width alone, in
prefill and decode alike; one kernel then selects and weights a row's experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemv.matmul import matvec_launch
from quengine.kernels.cpu.runtime.arguments import Arguments, Fp64
from quengine.kernels.cpu.runtime.kernel_table import router_kernel
from quengine.kernels.cpu.runtime.threads import Launch, get_threads
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.moe.router_kind import MOST_EXPERTS, MOST_EXPERTS_USED
from quengine.kernels.quant_tensor import QuantTensor

_TASKS = 4  # per thread
_PROMPT_ROWS = 64  # rows per kernel, where there are more
_PROMPT_TASKS = 8  # tasks of each such kernel


@dataclass
class RouterArguments(Arguments):
    """logits: fp32 rows of `count` values, followed by the logit of the shared expert's gate if there is one.

    bias, selection_bias, expert_scale: fp32 [count], or 0. forced: int32 [T, used], or 0. experts: int32 [T, width];
    weights: fp32 [T, width]; shared: fp32 [T], or 0. All are addresses. width: `used`, or one more: expert `count` is
    then the last of every row, with the weight of the gate if `gated`, else 1.
    """

    logits: int
    stride: int
    count: int
    used: int
    normalized: int
    scale: Fp64
    groups: int
    groups_used: int
    bias: int
    selection_bias: int
    forced: int
    experts: int
    weights: int
    shared: int
    expert_scale: int
    width: int
    gated: int


def logits_width(router: Router) -> int:
    """The width of a row of logits: experts, plus one for a shared expert's gate."""
    return router.weight.shape[0] + (router.shared_gate is not None)


def logits_launches(x: Tensor, router: Router, logits: Tensor) -> list[Launch]:
    """Independent kernels for the logits, fp32 [T, logits_width], of rows x fp32 [T, K]; the bias is added later."""
    count, weight, launches = router.weight.shape[0], _matrix(router.weight), list[Launch]()
    gate = None if router.shared_gate is None else _matrix(router.shared_gate.view(1, -1))
    # A task's weights, and the rows of a prompt that it multiplies them with, stay in the L2 cache.
    tasks = _PROMPT_TASKS if len(x) > _PROMPT_ROWS else _TASKS * get_threads()
    most, step = min(max(1, len(x)), _PROMPT_ROWS), -(-count // tasks)
    for first in range(0, max(1, len(x)), most):
        some, found = x[first : first + most], logits[first : first + most]
        launches.append(matvec_launch(some, weight, found, 0, after_previous=not launches, step=step))
        if gate is not None:
            launches.append(matvec_launch(some, gate, found, count, after_previous=False))
    return launches


def router_launch(logits: Tensor, router: Router, routing: Routing, forced: Tensor | None = None) -> Launch:
    """The kernel that fills in a routing: experts int32 [T, router.width], weights fp32 [T, router.width], shared fp32
    [T]. A task is a row.

    forced: int32 [T, k], contiguous: each row's experts in ascending order, read when the kernel runs, not checked.
    Raises ValueError for more experts than the kernel supports.
    """
    kind, count = router.kind, router.weight.shape[0]
    if count > MOST_EXPERTS or not 1 <= kind.used <= min(MOST_EXPERTS_USED, count):
        raise ValueError(
            f"{kind.used} of {count} experts; a router has at most {MOST_EXPERTS}, "
            f"and 1 to {MOST_EXPERTS_USED} of them compute a row"
        )
    arguments = RouterArguments(
        *(logits.data_ptr(), 4 * logits.stride(0), count, kind.used, int(kind.normalized), kind.scale),
        *(kind.groups, kind.groups_used, _address(router.bias), _address(router.selection_bias)),
        forced=_address(forced),
        experts=routing.experts.data_ptr(),
        weights=routing.weights.data_ptr(),
        shared=_address(routing.shared),
        expert_scale=_address(router.expert_scale),
        width=router.width,
        gated=int(router.shared_gate is not None),
    )
    keep = (logits, router, routing, forced)
    return Launch(router_kernel(kind.scores), arguments, logits.shape[0], keep=keep)


def checked_experts(experts: Tensor, router: Router) -> Tensor:
    """Experts that rows are to use, as `router_launch` reads them.

    Raises ValueError for an expert that the layer lacks.
    """
    count = router.weight.shape[0]
    given = experts.to(torch.int32).contiguous()
    named = sorted(set(given.flatten().tolist()))
    if not all(0 <= expert < count for expert in named):
        raise ValueError(f"a layer has experts 0 to {count - 1}, not {named}")
    return given


def _matrix(weight: Tensor) -> QuantTensor:
    """An fp32 weight [N, K] as a matvec's operand."""
    assert weight.dtype == torch.float32 and weight.is_contiguous()
    return QuantTensor("router", FORMATS["F32"], tuple(weight.shape), weight.view(torch.uint8))


def _address(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()
