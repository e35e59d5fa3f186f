"""The CUDA backend: packed weights through Triton, int16 activations in decode, fp16 matrix units in prefill.

A decode layer is five launches: QKV, attention (rotation, cache write, slices and their combination, rounding), output
with the residual, gate and up with SwiGLU and rounding, down with the residual. Output and down also begin the norm
behind them, and the matmul that reads it ends it. The residual stream is fp32. Implements kernels.backend.Backend.

Which kernels compute a row, and so its last bits, depend on how many rows there are, unless `fixed_kernels` are asked
for: then one family of kernels computes every number of rows, and a row's bits follow from its own sequence alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quengine.kernels.backend import (
    ALL_ROWS,
    AttentionSpec,
    Chunk,
    DecodeBatch,
    KVLayer,
    Position,
    PromptBatch,
    RowPicker,
)
from quengine.kernels.block_formats import dequantize
from quengine.kernels.cuda.activations import RoundedActivations, round_activations
from quengine.kernels.cuda.attention_arguments import DecodeWorkspace
from quengine.kernels.cuda.attention_decode import (
    attention_decode,
    attention_decode_half,
    attention_decode_round,
)
from quengine.kernels.cuda.attention_prefill import attention_prefill, prompt_rows, stores_ordered
from quengine.kernels.cuda.embedding import embedding
from quengine.kernels.cuda.half import Form, HalfRows, Products
from quengine.kernels.cuda.kv_store import KVStore
from quengine.kernels.cuda.matmul import MatmulWorkspace, matmul, matmul_norm, matmul_products, matmul_swiglu
from quengine.kernels.cuda.matvec import matvec
from quengine.kernels.cuda.matvec_norm import can_begin_norm, matvec_norm
from quengine.kernels.cuda.matvec_program import RoundingScratch
from quengine.kernels.cuda.matvec_swiglu import matvec_swiglu
from quengine.kernels.cuda.normed import NormedRows
from quengine.kernels.cuda.packed import PackedPart, PackedWeight, pack
from quengine.kernels.cuda.prompt_rows import LaidPrompts, PromptRows
from quengine.kernels.cuda.rms_norm import rms_norm, rms_norm_half, rms_norm_round
from quengine.kernels.cuda.rope import rope_store
from quengine.kernels.cuda.triton_cache import use_private_cache
from quengine.kernels.quant_tensor import QuantTensor

HOPPER = (9, 0)

DECODE_ROWS = 1
"""Rows up to which the q-dot is used. Its kernel takes 8, but compiling the one for 4 rows of Q4_K takes over a minute,
which nobody should wait for in front of a short prompt."""

MAX_EXPANDED = 80 << 20
"""Weights expanded to fp16 at once in prefill, at most: 160 MiB. A matrix that has more is expanded in pieces, and so
are gate and up, which lose nothing by it; pieces have half as many where nothing else needs the room."""

Rows = Tensor | RoundedActivations | HalfRows
"""What feeds a matmul: rounded rows where the q-dot reads them; elsewhere scaled fp16 rows after a norm, else fp32."""

Residual = Tensor | NormedRows
"""The residual stream: fp32 rows, behind a layer with the norm that reads them."""


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel may start, and read its weights, before the one before it has ended (sm_90 and later)."""
    return torch.cuda.get_device_capability(device) >= HOPPER


def takes_q_dot(rows: int) -> bool:
    """Whether so many rows are rounded to int16 for the q-dot; more of them go through fp16 matrix units."""
    return rows <= DECODE_ROWS


class CudaBackend(RowPicker):
    """See the module docstring. `device` must be a CUDA device of compute capability 8.0 or later.

    `fixed_kernels`: the result of a decode step's row is the same, to the last bit, alone and in every batch, captured
    or not; that of a prompt's row in every chunk, where a chunk of a single token is computed inside `prompt`. Batches
    and prompts share all kernels but attention's. Prompts and single sequences are slower then, and a single sequence's
    rows are rounded to fp16, as a batch's are.
    """

    def __init__(self, device: torch.device, fixed_kernels: bool = False) -> None:
        if device.type == "cuda":
            use_private_cache()
        self.name = "cuda"
        self.device = device
        self.fixed_kernels = fixed_kernels
        self.dtype = torch.float32
        self.pdl = has_dependent_launch(device)
        self._slices: list[DecodeWorkspace] = []
        self._scratch: RoundingScratch | None = None
        self._matmul_workspace: MatmulWorkspace | None = None
        self._made_positions: tuple[int, int, Tensor] | None = None
        self._made_prompts: tuple[PromptBatch, PromptRows] | None = None
        self._widest = 0
        self._largest = 0
        self._packed = False

    def weight(self, parts: Sequence[QuantTensor]) -> PackedWeight:
        return self._noted(pack(parts, self.device))

    def gate_up_weight(self, gate: QuantTensor, up: QuantTensor) -> PackedWeight:
        return self._noted(pack([gate, up], self.device, paired=True))

    def vector(self, parts: Sequence[QuantTensor]) -> Tensor:
        return torch.cat([dequantize(part.format, part.data).flatten() for part in parts]).to(self.device)

    def embed(self, weight: PackedWeight, ids: Tensor) -> Tensor:
        return embedding(weight, ids, pdl=self.pdl)

    def norm_linear(
        self, x: Residual, norm: Tensor, eps: float, weight: PackedWeight, bias: Tensor | None = None
    ) -> Tensor | Products:
        rows = self._normed(x, norm, eps)
        if bias is not None and isinstance(rows, RoundedActivations) and rows.rows == 1:
            return self._matmul(rows, weight, bias.view(1, -1))
        if bias is None and not isinstance(rows, RoundedActivations):
            return matmul_products(rows, weight, self._workspace(), pdl=self.pdl)
        y = self._matmul(rows, weight, None)
        return y if bias is None else y.add_(bias)

    def norm_swiglu(self, x: Residual, norm: Tensor, eps: float, gate_up: PackedWeight) -> Rows:
        rows = self._normed(x, norm, eps)
        if isinstance(rows, RoundedActivations):
            return matvec_swiglu(rows, gate_up, scratch=self._rounding_scratch(), pdl=self.pdl)
        return matmul_swiglu(rows, gate_up, self._workspace(), self.pdl)

    def linear_add(
        self, x: Rows, weight: PackedWeight, residual: Residual, norm: Tensor | None = None, eps: float = 0.0
    ) -> Residual:
        stream = residual.hidden if isinstance(residual, NormedRows) else residual
        rows = self._rounded(x)
        if norm is None or (isinstance(rows, RoundedActivations) and not can_begin_norm(weight)):
            return self._matmul(rows, weight, stream)
        if isinstance(rows, RoundedActivations):
            return matvec_norm(rows, weight, stream, norm, eps, self._rounding_scratch(), self.pdl)
        return NormedRows(*matmul_norm(rows, weight, self._workspace(), stream, norm, eps, pdl=self.pdl))

    def attention(self, qkv: Tensor | Products, spec: AttentionSpec, layer: KVLayer, start: Position) -> Rows:
        cache = KVStore.of_layer(layer)
        if isinstance(start, DecodeBatch):
            if start.consecutive:
                qkv = self._write_rows(qkv, spec, cache, start)
            overlaps = self.pdl and not start.consecutive
            return self._decode(qkv, spec, cache, start.positions, start.block_tables, overlaps)
        if isinstance(start, Tensor):
            return self._decode(qkv, spec, cache, start, None, self.pdl)
        if isinstance(start, PromptBatch):
            return self._prefill(qkv, spec, cache, 0, start.block_tables, self._prompt_rows(start, spec))
        first, table = (start.start, start.block_table) if isinstance(start, Chunk) else (start, None)
        tokens = (qkv.values if isinstance(qkv, Products) else qkv).shape[0]
        if tokens == 1 and not (self.fixed_kernels and self.in_prompt):
            tables = None if table is None else table[None]
            # Positions made just now must be complete before the launch that reads them begins.
            return self._decode(qkv, spec, cache, self._positions(first, 1), tables, False)
        return self._prefill(qkv, spec, cache, first, table)

    def pick(self, x: Rows | Residual, rows: slice | Tensor) -> Tensor:
        """Those rows of x, fp32. One row goes on as a decode step's does, unless kernels are fixed."""
        if isinstance(x, HalfRows):
            return x.pick(rows)
        assert not isinstance(x, RoundedActivations), "nothing is picked of a single token"
        return (x.hidden if isinstance(x, NormedRows) else x)[rows]

    def normed(self, x: Residual, norm: Tensor, eps: float) -> Tensor:
        stream = x.hidden if isinstance(x, NormedRows) else x
        return rms_norm(stream, norm, eps, pdl=self.pdl, fixed=self.fixed_kernels)

    def logits(
        self, x: Residual, norm: Tensor, eps: float, weight: PackedWeight, rows: slice | Tensor = ALL_ROWS
    ) -> Tensor:
        count = (x.hidden if isinstance(x, NormedRows) else x).shape[0]
        # Rows that are all that there are keep the norm that has been begun.
        whole = isinstance(rows, slice) and (rows == ALL_ROWS or count == 1)
        return self._matmul(self._normed(x if whole else self.pick(x, rows), norm, eps), weight, None)

    def _prefill(
        self,
        qkv: Tensor | Products,
        spec: AttentionSpec,
        cache: KVStore,
        first: int,
        table: Tensor | None,
        prompts: PromptRows | None = None,
    ) -> Rows:
        """Attention of a chunk from position `first` on, or of the chunks of several `prompts`."""
        tokens = (qkv.values if isinstance(qkv, Products) else qkv).shape[0]
        if prompts is None:
            positions, sequences = self._positions(first, tokens), None
        else:
            positions, sequences = prompts.positions, prompts.sequences
        if isinstance(qkv, Products):
            room = self._workspace()
            width, form = spec.heads * spec.head_dim, Form.ROW_MAJOR
            q = room.wide(tokens, width)
            q = rope_store(qkv, spec, cache, 0, positions, self.pdl, table, q, sequences)
            ordered = None
            if stores_ordered(cache, prompts, tokens) and room.form(tokens, width) is Form.ORDERED:
                ordered, form = room.half_rows(tokens, width).values, Form.ORDERED
            out = attention_prefill(
                q, spec, cache, 0, first, torch.float16, self.pdl, table,
                in_place=True, prompts=prompts, ordered=ordered,
            )  # fmt: skip
            return room.as_they_are(out, tokens, form)
        q = rope_store(qkv, spec, cache, 0, positions, self.pdl, table, sequences=sequences)
        return attention_prefill(
            q, spec, cache, 0, first, torch.float32, self.pdl, table, self.fixed_kernels, prompts=prompts
        )

    def _prompt_rows(self, batch: PromptBatch, spec: AttentionSpec) -> PromptRows:
        """Made once for the layers of a step."""
        if isinstance(batch, LaidPrompts):
            return batch.laid
        if self._made_prompts is None or self._made_prompts[0] is not batch:
            self._made_prompts = (batch, prompt_rows(batch, spec.head_dim, self.fixed_kernels))
        return self._made_prompts[1]

    def _write_rows(
        self, qkv: Tensor | Products, spec: AttentionSpec, cache: KVStore, start: DecodeBatch
    ) -> Tensor:
        """All rows' keys and values into the cache, ahead of an attention that reads those of other rows.

        It is the attention of each row to itself alone, whose result nobody wants. The launch behind it writes the same
        bits once more, so it does not matter which of the two a row reads.
        """
        qkv = qkv.finish() if isinstance(qkv, Products) else qkv
        rows = qkv.shape[0]
        unused = torch.empty(rows, spec.heads * spec.head_dim, dtype=torch.float32, device=self.device)
        alone, workspace = replace(spec, window=1), self._decode_workspace(spec, rows)
        tables = start.block_tables
        attention_decode(qkv, alone, cache, start.positions, workspace, unused, self.pdl, tables, coarse=True)
        return qkv

    def _decode(
        self,
        qkv: Tensor | Products,
        spec: AttentionSpec,
        cache: KVStore,
        positions: Tensor,
        tables: Tensor | None,
        pdl: bool,
    ) -> Rows:
        """Attention of one token of each of B sequences, as the matmul behind it reads it."""
        qkv = qkv.finish() if isinstance(qkv, Products) else qkv
        rows, width = qkv.shape[0], spec.heads * spec.head_dim
        workspace = self._decode_workspace(spec, rows)
        if self._takes_q_dot(rows):
            rounded = RoundedActivations.empty(rows, width, self.device)
            return attention_decode_round(qkv, spec, cache, positions, workspace, rounded, pdl, tables)
        room = self._workspace()
        half = room.half_rows(rows, width)
        out = room.as_they_are(half.values, rows, half.form)
        return attention_decode_half(qkv, spec, cache, positions, workspace, out, pdl, tables)

    def _normed(self, x: Residual, norm: Tensor, eps: float) -> Rows:
        if isinstance(x, NormedRows):
            return x.normed
        if self._takes_q_dot(x.shape[0]):
            return rms_norm_round(x, norm, eps, pdl=self.pdl)
        room = self._workspace().half_rows(*x.shape)
        return rms_norm_half(x, norm, eps, room, self.pdl, self.fixed_kernels)

    def _rounded(self, x: Rows) -> Rows:
        return round_activations(x) if isinstance(x, Tensor) and self._takes_q_dot(x.shape[0]) else x

    def _takes_q_dot(self, rows: int) -> bool:
        return not self.fixed_kernels and takes_q_dot(rows)

    def _matmul(self, x: Rows, weight: PackedWeight, residual: Tensor | None) -> Tensor:
        x = self._rounded(x)
        if isinstance(x, RoundedActivations):
            return matvec(x, weight, residual, pdl=self.pdl)
        return matmul(x, weight, self._workspace(), residual, self.pdl)

    def _positions(self, start: int, tokens: int) -> Tensor:
        """start .. start + tokens - 1, made once for the layers of a chunk."""
        if self._made_positions is None or self._made_positions[:2] != (start, tokens):
            made = torch.arange(start, start + tokens, dtype=torch.int32, device=self.device)
            self._made_positions = (start, tokens, made)
        return self._made_positions[2]

    def _noted(self, weight: PackedWeight) -> PackedWeight:
        """Remember how much room the prefill needs for this weight."""
        self._widest = max(self._widest, weight.cols)
        self._packed |= any(isinstance(part, PackedPart) for part in weight.parts)
        size = weight.rows * weight.cols
        whole = size <= MAX_EXPANDED and not weight.paired
        self._largest = max(self._largest, size if whole else min(size, MAX_EXPANDED // 2))
        return weight

    def _workspace(self) -> MatmulWorkspace:
        """Room for matmuls, kept from layer to layer. Few rows of a prompt have weights rounded as many have, those of
        a batch not."""
        if self._matmul_workspace is None:
            self._matmul_workspace = MatmulWorkspace(
                self._largest, self.device, self.fixed_kernels, self._packed
            )
        self._matmul_workspace.exact = self.in_prompt
        return self._matmul_workspace

    @property
    def rooms_left(self) -> int:
        """How often room for many rows was let go of for more. What was captured before then must not run again."""
        return self._workspace().rooms_left

    def _rounding_scratch(self) -> RoundingScratch:
        """One for all launches: each uses it only after the one in front has ended."""
        if self._scratch is None:
            self._scratch = RoundingScratch.empty(DECODE_ROWS, 2 * self._widest, self.device)
        return self._scratch

    def _decode_workspace(self, spec: AttentionSpec, rows: int) -> DecodeWorkspace:
        """Room for the largest batch met. A smaller one is kept: a captured graph may write to it."""
        if not self._slices or self._slices[-1].mixed.shape[0] < rows:
            room = DecodeWorkspace.allocate(rows, spec.heads, spec.kv_heads, spec.head_dim, self.device)
            self._slices.append(room)
        return self._slices[-1]
