"""Which launches compute a step of Mamba2's layer.

| step                                        | launches                                                  |
|---------------------------------------------|-----------------------------------------------------------|
| a row of each sequence                      | decode; gated norm                                        |
| chunks of prompts                           | convolve; scan by chunks; gated norm                      |
| the same, batch-invariant                   | convolve; scan by rows; gated norm                        |
| several rows of a sequence in decode        | convolve; scan by rows; gated norm                        |
"""

import torch
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.gated_delta.rows import StateRows
from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.mamba2.arithmetic import net_of
from quengine.kernels.cuda.mamba2.convolve import convolve
from quengine.kernels.cuda.mamba2.decode import decode
from quengine.kernels.cuda.mamba2.gated_norm import gated_norm
from quengine.kernels.cuda.mamba2.scan import scan_by_chunks, scan_by_rows
from quengine.kernels.mamba2 import Mamba2Spec

Out = Tensor | QuantizedActivations | Fp16Operand
"""Where a result [T, width] goes: contiguous fp32; quantized; or scaled fp16."""


def mamba2_decode(
    step: StateRows, spec: Mamba2Spec, state: SlotLayer, out: Out, ahead: bool = False, pdl: bool = False
) -> None:
    """Computes one row of each sequence; x needs no scale. `ahead`: see `decode`."""
    net = net_of(spec, state.parts[0].shape[1])
    y = torch.empty(len(step.x), net.width, dtype=torch.float32, device=step.x.device)
    decode(step.x, spec, state, step.positions, step.block_tables, y, ahead, pdl)
    gated_norm(y, step, spec, net, out, pdl)


def mamba2_rows(
    step: StateRows,
    spec: Mamba2Spec,
    state: SlotLayer,
    out: Out,
    batch_invariant: bool = False,
    pdl: bool = False,
) -> None:
    """Computes prompts, and decode steps in which a sequence may have several rows."""
    history, memory = state.parts
    net = net_of(spec, history.shape[1])
    assert history.is_contiguous() and memory.is_contiguous() and step.x.stride(1) == 1
    assert step.x.shape[1] == sum(spec.widths)
    xbc, gates = convolve(step, spec, net, history, pdl)
    scan = scan_by_rows if step.tiles is None or batch_invariant else scan_by_chunks
    scan(step, spec, xbc, gates, net, history, memory, pdl)
    gated_norm(xbc[:, : net.width], step, spec, net, out, pdl)
