"""Checks layers of encoders of images on this machine's device against the same layers in float64."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quengine.diagnostics.harness import KernelCheck, checked
from quengine.diagnostics.selftest.self_test import HALF
from quengine.kernels.backend import Backend
from quengine.kernels.vision_rows import Norm, PatchActivation
from quengine.models.vision.blocks import (
    Linear,
    Mlp,
    VisionAttention,
    axial_angles,
    rotation_of_halves,
    rotation_of_pairs,
)
from quengine.models.vision.vision_block import VisionBlock

HEADS, HEAD_DIM, HIDDEN = 4, 72, 400
HEIGHT, WIDTH = 9, 5
IMAGES = 2
_EPS = 1e-6

VISION = "image encoder"
"""The subject."""
LAYERS = ("layer", "gated layer")
"""As SigLIP's, rotated in halves; and as Pixtral's and Gemma 4's, rotated in pairs, with norms of heads and results."""


def check_vision(backend: Backend[Any], subject: str) -> Iterator[KernelCheck]:
    """The checks of LAYERS on the backend's device; an exception on the way is their failure."""
    for test in LAYERS:
        yield checked(subject, test, HALF, partial(_results, backend.device, test == "gated layer"))


def _results(device: torch.device, gated: bool) -> tuple[Tensor, Tensor]:
    x = torch.randn(IMAGES, HEIGHT * WIDTH, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1))
    matrix = torch.float16 if device.type == "cuda" else torch.float32
    with torch.no_grad():
        here = _Layer(torch.device("cpu"), torch.float64, torch.float64, gated)
        there = _Layer(device, matrix, torch.float32, gated)
        return there(x), here(x)


@dataclass
class _Layer:
    """A layer with the same weights for every device and dtype, which are exact in fp16."""

    device: torch.device
    matrix: torch.dtype
    vector: torch.dtype
    gated: bool

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(2)

    def __call__(self, x: Tensor) -> Tensor:
        """x [B, rows, width] in host memory -> the same."""
        angles = axial_angles(HEIGHT, WIDTH, HEAD_DIM, 1e4, self.device)
        rotation = rotation_of_pairs(angles) if self.gated else rotation_of_halves(angles)
        return self._block()(x.to(self.device, self.vector), rotation)

    def _block(self) -> VisionBlock:
        width = HEADS * HEAD_DIM
        heads = (self._norm(HEAD_DIM), self._norm(HEAD_DIM), self._norm(HEAD_DIM))
        attention = VisionAttention(
            self._linear(3 * width, width),
            self._linear(width, width),
            HEADS,
            norms=heads if self.gated else (None, None, None),
        )
        gate = self._linear(HIDDEN, width) if self.gated else None
        act: PatchActivation = "silu" if self.gated else "gelu_tanh"
        mlp = Mlp(self._linear(HIDDEN, width), self._linear(width, HIDDEN), act, gate)
        post = (self._norm(width), self._norm(width)) if self.gated else None
        return VisionBlock(self._norm(width), attention, self._norm(width), mlp, post=post)

    def _linear(self, rows: int, cols: int) -> Linear:
        weight = torch.randn(rows, cols, generator=self._random) * cols**-0.5
        bias = None if self.gated else self._vector(rows)
        return Linear(weight.half().to(self.device, self.matrix), bias, self.matrix)

    def _norm(self, size: int) -> Norm:
        bias = None if self.gated else self._vector(size)
        return Norm(1 + self._vector(size), bias, _EPS, centred=not self.gated)

    def _vector(self, size: int) -> Tensor:
        values = torch.randn(size, generator=self._random) * 0.2
        return values.half().to(self.device, self.vector)
