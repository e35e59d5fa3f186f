"""Per-layer embeddings, which layers get beside the residual stream, on a backend: see blocks/layer_input.py."""

from dataclasses import replace
from math import sqrt

import numpy as np
import torch

from quengine.kernels.backend import Hidden
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.layer_input import TABLE, LayerInput
from quengine.models.layers import LayerTensors


class LayerInputs:
    """Computes the inputs of all layers for a step's tokens, [T, layers * length].

    An input is the sum of two terms, divided by sqrt(2): the projection of the token's embedding, divided by
    sqrt(width) and normalized, and the token's row of the table, times sqrt(length). The norm's weight and eps and the
    table's scale contain these factors.

    tensors: the tensors outside of layers. vocabulary: number of tokens; ids past the table's end use its first row.
    """

    def __init__(self, tensors: LayerTensors, width: int, length: int, vocabulary: int) -> None:
        self.backend, self._vocabulary = tensors.backend, vocabulary
        self.project = tensors.weight("per_layer_model_proj")
        (table,) = tensors.take(TABLE)
        self.table = self.backend.row_table(table)
        weight = tensors.vector("per_layer_proj_norm") * 2.0**-0.5
        self.norm = RMSNorm(weight, tensors.eps * width)
        self.scale = float(np.float32(sqrt(length))) * 2.0**-0.5

    def __call__(self, batch: ForwardBatch, x: Hidden) -> Hidden:
        """x: the embedded tokens, which stay as they are."""
        ids = batch.token_ids
        if self.table.rows < self._vocabulary:
            ids = ids.where(ids < self.table.rows, 0)
        if batch.embeds is not None:
            # Image rows use the table's first row. -1, which stands for no row, marks the extra last entry.
            given = torch.zeros(len(batch) + 1, dtype=torch.bool, device=ids.device)
            given.scatter_(0, batch.embeds.rows.remainder(len(given)), True)
            ids = ids.masked_fill(given[:-1], 0)
        if ids is not batch.token_ids:
            batch = replace(batch, token_ids=ids)
        projected = self.backend.norm_linear(batch, x, None, self.project)
        return self.backend.layer_inputs(batch, projected, self.norm, self.table, self.scale)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step of one row reads."""
        return int(self.project.nbytes + self.table.nbytes // self.table.rows)


class LayerInputLayer:
    """The end of a layer with per-layer embeddings, which adds them to the stream."""

    def __init__(self, declared: LayerInput, tensors: LayerTensors) -> None:
        self.backend = tensors.backend
        self.layer = tensors.layer
        self.activation = declared.activation
        self.gate = tensors.weight("inp_gate")
        self.project = tensors.weight("proj")
        self.post_norm = tensors.ending_norm("post_norm", declared.norms)

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        inputs: Hidden,
        next_norm: Norm | None,
        residual: Hidden | None = None,
    ) -> Hidden:
        """The new residual stream. `inputs`: the result of `LayerInputs`. `next_norm`: the norm that reads the new
        stream. `residual`: the rows to which the embeddings are added; None: x."""
        gated = self.backend.input_glu(batch, x, self.gate, inputs, self.layer, self.activation)
        added_to = x if residual is None else residual
        return self.backend.linear_add(batch, gated, self.project, added_to, next_norm, self.post_norm)

    @property
    def nbytes(self) -> int:
        return int(self.gate.nbytes + self.project.nbytes)
