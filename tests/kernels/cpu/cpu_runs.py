"""Operations of the CPU as its tests call them: each recorded and run."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quengine.kernels import cpu
from quengine.kernels.backend import KVLayer, SlotLayer
from quengine.kernels.cpu.attention.attention import Seen, attention_launches, check_caches, part_bytes
from quengine.kernels.cpu.runtime.threads import run
from quengine.kernels.cpu.step_inputs import BatchInputs
from quengine.kernels.cpu.step_recorder import CpuWeight, StepRecorder, recorded, state_operation
from quengine.kernels.forward_batch import ForwardBatch, decode_batch
from quengine.kernels.gated_delta import GatedDeltaSpec
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kernels.mamba2 import Mamba2Spec
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.short_conv import ShortConvSpec
from tests.forward import one_sequence

STEP = decode_batch([0], [0], [[[0]]], torch.device("cpu"))
"""For operations that read only their arguments."""


def decode_linear(x: Tensor, parts: Sequence[QuantTensor]) -> Tensor:
    """x [T, K] as decode multiplies it."""
    with recorded(STEP, len(x)) as step:
        return step.norm_linear(x, None, CpuWeight(tuple(parts)), None)


def linear(x: Tensor, parts: Sequence[QuantTensor]) -> Tensor:
    """Few rows as decode multiplies them, many as a prompt does."""
    return decode_linear(x, parts) if len(x) <= 8 else cpu.prompt_linear(x, parts)


def embed(weight: QuantTensor, ids: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of a weight."""
    batch = ForwardBatch("prefill", ids, ids, ids.view(1, 1, -1))
    with recorded(batch, len(ids)) as step:
        return step.embed(CpuWeight((weight,)), scale)


def short_conv(batch: ForwardBatch, bcx: Tensor, spec: ShortConvSpec, layer: SlotLayer) -> Tensor:
    return state_operation(batch, bcx, spec.channels, spec, layer, StepRecorder.short_conv)


def gated_delta(batch: ForwardBatch, x: Tensor, spec: GatedDeltaSpec, layer: SlotLayer) -> Tensor:
    return state_operation(batch, x, spec.inner, spec, layer, StepRecorder.gated_delta)


def mamba2(batch: ForwardBatch, x: Tensor, spec: Mamba2Spec, layer: SlotLayer) -> Tensor:
    return state_operation(batch, x, spec.inner, spec, layer, StepRecorder.mamba2)


def route(x: Tensor, router: Router, experts: Tensor | None = None) -> Routing:
    """The routing of normalised rows."""
    with recorded(STEP, len(x)) as step:
        return step.route(x, None, router, experts)


def batch_attention(
    q: Tensor,
    layer: KVLayer,
    batch: ForwardBatch,
    scale: float,
    window: int | None,
    sinks: Tensor | None = None,
    cap: float = 0.0,
) -> Tensor:
    """Attention of each sequence's newest token, q [B, H, hd], in the first cache group."""
    check_caches(q, layer)
    visible = BatchInputs(batch).visible(0, layer.k.shape[0], Seen(window))
    out = torch.empty(*q.shape[:2], layer.value_dim)
    parts = torch.empty(part_bytes(visible, *out.shape[1:]), dtype=torch.uint8)
    run(attention_launches(q, layer, visible, scale, out, parts, sinks, cap))
    return out


def attend_token(
    q: Tensor, layer: KVLayer, length: int, scale: float, first: int = 0, sinks: Tensor | None = None
) -> Tensor:
    """One token's attention, q [H, hd], over positions first .. length - 1, which lie in rows of the same numbers."""
    batch = one_sequence([0], length - 1, blocks=-(-length // BLOCK_SIZE))
    return batch_attention(q.unsqueeze(0), layer, batch, scale, length - first, sinks=sinks)[0]


def attend_chunk(
    q: Tensor,
    layer: KVLayer,
    start: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of a chunk, q [T, H, hd], over positions that lie in rows of the same numbers."""
    table = torch.arange(-(-layer.k.shape[0] // BLOCK_SIZE))
    return cpu.prefill_attention(q, layer, start, scale, window, table, sinks)
