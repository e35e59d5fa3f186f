"""Layers with alternating updates, and the rows of a token around them, on a backend: see blocks/altup.py."""

from math import sqrt
from typing import Any

import torch
from torch import Tensor

from quengine.kernels import altup
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
    """Makes the rows of a token [T, N, W] of its embedding [T, W], and the last hidden row of those after layers."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.backend = tensors.backend
        (project,), (unembed,) = tensors.take(PROJECT), tensors.take(UNEMBED)
        self._count = project.shape[0]
        self._project = self.backend.weight(project.matrices())
        self._unembed: list[Any] = [self.backend.weight([each]) for each in unembed.matrices()]

    def open(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        projected = self.backend.linear(batch, x, self._project).view(len(x), self._count, -1)
        return torch.cat([x[:, None], altup.of_size(projected, x[:, None])], 1)

    def close(self, batch: ForwardBatch, x: Tensor) -> Tensor:
        first, every = x[:, 0], x[:, 0].clone()
        for number, weight in enumerate(self._unembed, start=1):
            row = self.backend.linear(batch, x[:, number].contiguous(), weight)
            every += altup.of_size(row, first)
        return every / (self._count + 1)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads."""
        return int(self._project.nbytes + sum(weight.nbytes for weight in self._unembed))


class AltUpLayer(DecoderLayer):
    """A layer that computes the first of a token's rows, [T, N, W]."""

    def __init__(self, block: Block, declared: AltUp, tensors: LayerTensors, tables: LayerTables) -> None:
        super().__init__(block, tensors, tables)
        count, width = declared.streams, declared.width
        norm = RMSNorm(tensors.vector("altup_router_norm") / width, tensors.eps)
        self._router_norm, self._router = norm, tensors.vector("altup_router").view(count, width)
        self._predict = tensors.vector("altup_predict_coef").view(count * count, count)
        self._correct = tensors.vector("altup_correct_coef").view(count, count)
        self._scale = tensors.vector("altup_correct_scale")
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
        """As of DecoderLayer, of the rows of each token."""
        backend, mixer, ffn, norm = self.backend, self.mixer, self.ffn, self.norm
        assert mixer is not None and ffn is not None and norm is not None
        predictions = altup.predict(x, self._modalities(x[:, 0].contiguous()), self._predict)
        active = predictions[:, 0].clone()  # the mixer may write its result over it
        normed = backend.normed(active, norm)
        beside = backend.linear(batch, normed, self._left)
        beside = backend.linear_add(batch, beside, self._right, normed, None, self._laurel_norm)
        y = mixer(batch, active, cache, None, rows)
        if rows is not None:
            beside, predictions = backend.gather_rows(beside, rows), backend.gather_rows(predictions, rows)
            inputs = backend.gather_rows(inputs, rows)
        y = ffn(batch, (y + beside) / sqrt(2.0), None)
        found = altup.correct(predictions, y, self._modalities(y), self._correct)
        found[:, 1:] += self._of_input(batch, found[:, 0] * self._scale, inputs)[:, None]
        return found

    def _modalities(self, x: Tensor) -> Tensor:
        return altup.modalities(self.backend.normed(x, self._router_norm), self._router)

    def _of_input(self, batch: ForwardBatch, x: Tensor, inputs: Hidden) -> Tensor:
        """What a layer adds to the other rows: a norm of the projected product of the gate of x and its input."""
        assert isinstance(self.input, LayerInputLayer)
        added: Tensor = self.input(batch, x, inputs, None, torch.zeros_like(x))
        return added
