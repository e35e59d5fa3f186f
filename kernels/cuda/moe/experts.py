"""The mixture-of-experts operations on CUDA: few rows by q-dot, more rows grouped by expert.

A decode layer's feed-forward is three launches: the router, gate and up, down. Gate and up let their dependents start
when the router has ended, so that down knows its experts, and reads their weights, before it waits.
"""

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from quengine.kernels.cuda.gemm.fp16_operand import Fp16Operand
from quengine.kernels.cuda.gemm.workspace import MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.gemv.matvec_program import QuantizationScratch
from quengine.kernels.cuda.moe.expert_weights import ExpertWeights
from quengine.kernels.cuda.moe.grouped import GroupedRows, grouped_add, grouped_glu
from quengine.kernels.cuda.moe.matvec_experts_add import matvec_experts_add
from quengine.kernels.cuda.moe.matvec_experts_glu import matvec_experts_glu
from quengine.kernels.cuda.moe.router import route, scratch_width
from quengine.kernels.cuda.rms_normed import RmsNormed
from quengine.kernels.glu import Activation
from quengine.kernels.moe.router import Router, Routing
from quengine.kernels.rms_norm import RMSNorm

GatedRows = QuantizedActivations | GroupedRows
"""activation(gate) * up of each row's experts, in memory that no other operation of the layer writes."""


class ExpertOperations:
    """The expert operations of a CudaBackend. `workspace`: returns the workspace of its matmuls of many rows.

    q-dot results, and all of the router's, are bit-identical for any number of rows.
    """

    def __init__(self, device: torch.device, workspace: Callable[[], MatmulWorkspace], pdl: bool) -> None:
        self.device = device
        self.workspace = workspace
        self.pdl = pdl
        self._scratch: dict[int, QuantizationScratch] = {}

    def route(self, x: Tensor, norm: RMSNorm, router: Router, experts: Tensor | None) -> Routing:
        """The routing of the norm of rows x fp32 [T, K]."""
        scratch = self._room(scratch_width(x.shape[0], router))
        return route(x, norm, router, experts, scratch, self.pdl)

    def glu(
        self,
        x: QuantizedActivations | Fp16Operand | Tensor,
        routing: Routing,
        gate_up: ExpertWeights,
        activation: Activation,
        exact: bool,
        norm: RMSNorm | None = None,
    ) -> GatedRows:
        """activation(gate) * up of rows x [T, K] by each row's experts; `norm`: see `grouped_glu`."""
        if not isinstance(x, QuantizedActivations):
            return grouped_glu(x, routing, gate_up, self.workspace(), activation, self.pdl, exact, norm)
        scratch = self._room(routing.experts.numel() * gate_up.expert_rows // 2)
        return matvec_experts_glu(x, routing, gate_up, activation, scratch, self.pdl)

    def add(
        self,
        gated: GatedRows,
        routing: Routing,
        down: ExpertWeights,
        residual: Tensor,
        next_norm: RMSNorm | None,
        exact: bool,
    ) -> Tensor | RmsNormed:
        """The weighted sum of `down` of each row's experts, plus residual [T, N]."""
        if isinstance(gated, GroupedRows):
            return grouped_add(gated, routing, down, self.workspace(), residual, next_norm, self.pdl, exact)
        return matvec_experts_add(
            gated, routing, down, residual, next_norm, self._room(residual.numel()), self.pdl
        )

    def _room(self, width: int) -> QuantizationScratch:
        """Scratch for `width` values. All scratch stays allocated: a captured graph may write to it. Each
        launch uses it only after the one before has ended.
        """
        capacity = triton.next_power_of_2(width)
        if capacity not in self._scratch:
            self._scratch[capacity] = QuantizationScratch.empty(capacity, self.device)
        return self._scratch[capacity]
