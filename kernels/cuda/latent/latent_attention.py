"""Which launches compute a step of latent attention.

| step                            | launches                                                                        |
|---------------------------------|---------------------------------------------------------------------------------|
| a row, quantized for the q-dot  | rows; heads' matrices by q-dot; decode, merge; heads' matrices by q-dot         |
| a row of each sequence          | rows; grouped matmul; decode, merge; grouped matmul; rows put in order          |
| chunks of prompts               | rows; grouped matmul; prefill; grouped matmul; rows put in order                |

A head's matrices are multiplied as an expert's are, by rows that are grouped by head (HeadPlaces).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quengine.kernels.backend import KVLayer
from quengine.kernels.cuda.gemm.fp16_operand import (
    Fp16Operand,
    OperandLayout,
    ScaledProduct,
    operand_shape,
    padded_cols,
)
from quengine.kernels.cuda.gemm.workspace import FEW_ROWS, MatmulWorkspace
from quengine.kernels.cuda.gemv.activations import QuantizedActivations
from quengine.kernels.cuda.latent.decode import LatentWorkspace, latent_decode
from quengine.kernels.cuda.latent.prefill import latent_prefill
from quengine.kernels.cuda.latent.rows import latent_rows
from quengine.kernels.cuda.latent.shapes import HeadPlaces
from quengine.kernels.cuda.moe.grouped import head_places, head_products
from quengine.kernels.cuda.moe.matvec_expert_rows import matvec_expert_rows
from quengine.kernels.forward_batch import ForwardBatch, PrefillTiles
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.moe.router import Routing

Rows = Tensor | ScaledProduct


class LatentOperations:
    """Latent attention on a device. Workspaces stay allocated: a captured graph may write to them."""

    def __init__(self, device: torch.device, batch_invariant: bool, pdl: bool) -> None:
        self.device, self.batch_invariant, self.pdl = device, batch_invariant, pdl
        self._workspaces: dict[tuple[int, int, bool], list[LatentWorkspace]] = {}
        self._routings: dict[int, Routing] = {}

    def prepare(self, spec: LatentSpec) -> None:
        """Allocates what a captured step may not allocate."""
        if spec.heads not in self._routings:
            every = torch.arange(spec.heads, dtype=torch.int32, device=self.device).view(1, -1)
            self._routings[spec.heads] = Routing(every, torch.ones_like(every, dtype=torch.float32))

    def one_row(self, batch: ForwardBatch, q: Rows, latent: Rows, spec: LatentSpec, layer: KVLayer) -> Tensor:
        """The attention of a single token, by q-dot: fp32 [1, heads * values]."""
        routing, tables = self._routings[spec.heads], batch.block_tables_of(spec.cache_group)
        rounded = QuantizedActivations.empty(spec.heads, spec.plain, self.device)
        turned = self._turned(1, spec)
        latent_rows(q, latent, spec, layer, batch.positions, tables, None, turned, rounded, pdl=self.pdl)
        absorbed = matvec_expert_rows(rounded, routing, spec.absorb, self.pdl)
        sums = QuantizedActivations.empty(spec.heads, spec.rank, self.device)
        room = self._workspace(1, spec, False)
        latent_decode(absorbed, turned, spec, layer, batch.positions, tables, room, sums, pdl=self.pdl)
        return matvec_expert_rows(sums, routing, spec.expand, self.pdl).view(1, -1)

    def many_rows(
        self,
        batch: ForwardBatch,
        q: Rows,
        latent: Rows,
        spec: LatentSpec,
        layer: KVLayer,
        tiles: PrefillTiles | None,
        workspace: MatmulWorkspace,
    ) -> Tensor:
        """The attention of a decode step's tokens, or, with `tiles`, of chunks of prompts: fp32 [T, heads * values]."""
        tokens, tables = len(batch), batch.block_tables_of(spec.cache_group)
        widest = max(spec.rank, spec.values, spec.plain)
        room = _Room(*head_places(tokens, spec.heads, workspace), workspace, widest)
        places, exact = room.places, batch.phase == "prefill"
        of_block = room.take("blocks", torch.int32, 1 + places.blocks)
        turned, queries = self._turned(tokens, spec), room.operand("queries", spec.plain)
        sequences = None if tiles is None else tiles.sequences
        latent_rows(
            *(q, latent, spec, layer, batch.positions, tables, sequences, turned, queries, places, of_block),
            pdl=self.pdl,
        )
        absorbed = room.take("products", torch.float32, places.places, spec.rank)
        head_products(queries, spec.absorb, places, of_block, absorbed, workspace, self.pdl, exact)
        sums = room.operand("sums", spec.rank)
        if tiles is None:
            held = self._workspace(tokens, spec, True)
            latent_decode(
                *(absorbed, turned, spec, layer, batch.positions, tables, held, sums, places, True),
                pdl=self.pdl,
            )
        else:
            latent_prefill(
                *(absorbed, turned, spec, layer, tables, tiles, places, sums, self.batch_invariant),
                pdl=self.pdl,
            )
        values = room.take("products", torch.float32, places.places, spec.values)
        head_products(sums, spec.expand, places, of_block, values, workspace, self.pdl, exact)
        by_head = values.view(spec.heads, places.of_head, spec.values)[:, :tokens]
        return by_head.transpose(0, 1).reshape(tokens, -1)

    def _turned(self, rows: int, spec: LatentSpec) -> Tensor:
        return torch.empty(rows, spec.heads, spec.rotated, dtype=torch.float32, device=self.device)

    def _workspace(self, rows: int, spec: LatentSpec, coarse: bool) -> LatentWorkspace:
        """The workspace for layers of these sizes, allocated for the largest batch so far."""
        held = self._workspaces.setdefault((spec.heads, spec.rank, coarse), [])
        if not held or held[-1].acc.shape[0] < rows:
            held.append(LatentWorkspace.allocate(rows, spec.heads, spec.rank, coarse, self.device))
        return held[-1]


@dataclass(frozen=True)
class _Room:
    """Buffers of rows at their places, which the layers of a step share. widest: the most elements of a row."""

    places: HeadPlaces
    layout: OperandLayout
    workspace: MatmulWorkspace
    widest: int

    def take(self, name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        # Buffers of up to FEW_ROWS rows are allocated for FEW_ROWS, so that their addresses stay the same.
        least = 0
        if self.places.tokens <= FEW_ROWS:
            least = 2 * FEW_ROWS * self.places.heads * padded_cols(self.widest) * dtype.itemsize
        return self.workspace.of_experts(f"heads' {name}", dtype, self.places.tokens, shape, least)

    def operand(self, name: str, cols: int) -> Fp16Operand:
        values = self.take(name, torch.float16, *operand_shape(self.places.places, cols, self.layout))
        return Fp16Operand(
            values, self.take(f"{name}' scales", torch.float32, self.places.places), self.layout
        )
