"""Layers with alternating updates, and a token's rows before and after them, on a backend: see blocks/altup.py."""

from typing import Any

import torch
from torch import Tensor

from quengine.kernels.altup_operations import AltUpSpec
from quengine.kernels.backend import Hidden, LayerState
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.layer_norm import Norm
from quengine.kernels.rms_norm import RMSNorm
from quengine.models.blocks.altup import PROJECT, UNEMBED, AltUp
from quengine.models.blocks.block import Block
from quengine.models.decoder_layer import DecoderLayer
from quengine.models.layer_input import LayerInputLayer
from quengine.models.layer_tables import LayerTables
from quengine.models.layers import LayerTensors


class Streams:
    """Makes the N rows of each token, [N, T, W], from embeddings [T, W], and hidden rows [T, W] from the rows after
    the last layer."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.backend = tensors.backend
        (project,), (unembed,) = tensors.take(PROJECT), tensors.take(UNEMBED)
        self._project = self.backend.weight(project.matrices())
        self._unembed: list[Any] = [self.backend.weight([each]) for each in unembed.matrices()]

    def open(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        return self.backend.altup.opened(batch, x, self._project)

    def close(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        return self.backend.altup.closed(batch, x, self._unembed)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return int(self._project.nbytes + sum(weight.nbytes for weight in self._unembed))


class AltUpLayer(DecoderLayer):
    """A layer that computes the first of a token's rows, [N, T, W]."""

    def __init__(self, block: Block, declared: AltUp, tensors: LayerTensors, tables: LayerTables) -> None:
        super().__init__(block, tensors, tables)
        count, width = declared.streams, declared.width
        norm = RMSNorm(tensors.vector("altup_router_norm") / width, tensors.eps)
        self._spec = AltUpSpec(
            norm,
            router=tensors.vector("altup_router").view(count, width),
            predict=tensors.vector("altup_predict_coef").view(count * count, count),
            correct=tensors.vector("altup_correct_coef").view(count, count),
            scale=tensors.vector("altup_correct_scale"),
        )
        self._left, self._right = tensors.weight("laurel_l"), tensors.weight("laurel_r")
        self._laurel_norm = RMSNorm(tensors.vector("laurel_post_norm"), tensors.eps)

    @property
    def nbytes(self) -> int:
        return super().nbytes + int(self._left.nbytes + self._right.nbytes)

    def __call__(
        self,
        batch: ForwardBatch,
        x: Hidden,
        cache: LayerState,
        _next_norm: Norm | None,
        rows: Tensor | None = None,
        inputs: Hidden | None = None,
    ) -> Tensor:
        """As DecoderLayer, for all rows of each token."""
        altup, mixer, ffn, norm = self.backend.altup, self.mixer, self.ffn, self.norm
        assert mixer is not None and ffn is not None and norm is not None
        assert isinstance(self.input, LayerInputLayer)
        predictions, active = altup.predicted(batch, x, self._spec)
        beside = altup.beside(batch, active, norm, self._left, self._right, self._laurel_norm)
        y = mixer(batch, active, cache, None, rows)
        if rows is not None:
            # predictions[:, rows] wakes torch's threads even for one row.
            beside, predictions = self.backend.gather_rows(beside, rows), predictions.index_select(1, rows)
            inputs = self.backend.gather_rows(inputs, rows)
        y = ffn(batch, altup.joined(batch, y, beside), None)
        found, first = altup.corrected(batch, predictions, y, self._spec)
        added = self.input(batch, first, inputs, None, torch.zeros_like(first))
        return altup.added(batch, found, added)
