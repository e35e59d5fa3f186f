"""Which launches compute a step of the gated delta net.

| step                                        | launches                                                  |
|---------------------------------------------|-----------------------------------------------------------|
| a row, quantized for the q-dot              | decode, with the gated norm                               |
| a row of each sequence                      | decode; gated norm                                        |
| chunks of prompts                           | convolve; chunks; recurrence by chunks; gated norm        |
| the same, batch-invariant                   | convolve; recurrence by rows; gated norm                  |
| several rows of a sequence in decode        | convolve; recurrence by rows; gated norm                  |
| drafts that are verified on the device      | the same; once they are, advance                          |
"""

import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.gated_delta.advance import PendingNet
from quengine.kernels.cuda.gated_delta.arithmetic import net_of
from quengine.kernels.cuda.gated_delta.chunks import chunk_matrices
from quengine.kernels.cuda.gated_delta.convolve import convolve
from quengine.kernels.cuda.gated_delta.decode import can_norm, decode
from quengine.kernels.cuda.gated_delta.gated_norm import gated_norm
from quengine.kernels.cuda.gated_delta.recurrence import carry_by_chunks, carry_by_rows, verify_by_rows
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.forward_batch import PendingStates
from quengine.kernels.gated_delta import GatedDeltaSpec

TILE_ROWS = 64
"""Rows of a tile of a prompt's chunk, or a multiple of it."""

Out = Tensor | QuantizedActivations | Fp16Operand
"""Where a result [T, width] goes: contiguous fp32; quantized; or scaled fp16."""


def gated_delta_decode(
    step: StateRows,
    spec: GatedDeltaSpec,
    state: SlotLayer,
    out: Out,
    ahead: bool = False,
    pdl: bool = False,
) -> None:
    """Computes one row of each sequence; x needs no scale. `ahead`: see `decode`."""
    history, _ = state.parts
    net = net_of(spec, history.shape[1])
    if isinstance(out, QuantizedActivations) and can_norm(net):
        decode(step.x, spec, state, step.positions, step.block_tables, out, ahead, pdl)
        return
    o = torch.empty(len(step.x), net.width, dtype=torch.float32, device=step.x.device)
    decode(step.x, spec, state, step.positions, step.block_tables, o, ahead, pdl)
    gated_norm(o, step, spec, net, out, pdl)


def gated_delta_rows(
    step: StateRows,
    spec: GatedDeltaSpec,
    state: SlotLayer,
    out: Out,
    batch_invariant: bool = False,
    pdl: bool = False,
    pending: list[PendingStates] | None = None,
) -> None:
    """Computes any step whose sequences may have several rows. pending: see `ForwardBatch`."""
    history, memory = state.parts
    net = net_of(spec, history.shape[1])
    assert history.is_contiguous() and memory.is_contiguous() and step.x.stride(1) == 1
    assert step.x.shape[1] == sum(spec.widths)
    qkv, gates = convolve(step, spec, net, history, pdl)
    if pending is not None:
        o, kept = verify_by_rows(step, qkv, gates, net, history, memory, pdl)
        held = step.positions, step.block_tables, history, memory
        pending.append(PendingNet(net, qkv, gates, kept, *held, pdl))
        gated_norm(o, step, spec, net, out, pdl)
        return
    if step.tiles is None or batch_invariant:
        carry_by_rows(step, qkv, gates, net, history, memory, pdl)
    else:
        matrices = chunk_matrices(qkv, gates, net, step.tiles, pdl)
        carry_by_chunks(step, qkv, gates, matrices, net, history, memory, pdl)
    gated_norm(qkv[:, net.channels - net.width :], step, spec, net, out, pdl)
