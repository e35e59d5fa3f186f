"""Steps of latent attention as the definition computes them, for the tests of both devices' kernels."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import KVLayer
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer, write_rows
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.rope import RopeSpec, rope_table
from tests.kernels.weights import random_weight

BLOCKS, CONTEXT = 24, 256


def prompt(lengths: Sequence[int], starts: Sequence[int]) -> ForwardBatch:
    """Chunks of sequences, whose blocks lie apart."""
    return prefill_batch([[0] * n for n in lengths], starts, _tables(len(lengths)), torch.device("cpu"))


def tokens(positions: Sequence[int], sequences: Sequence[int], shares: bool = False) -> ForwardBatch:
    tables = _tables(1 + max(sequences))
    own = [tables[sequence] for sequence in sequences]
    return decode_batch([0] * len(positions), positions, own, torch.device("cpu"), shares)


def _tables(count: int) -> list[list[list[int]]]:
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(4)) + 1
    of_each = BLOCKS // 4
    return [[order[of_each * i : of_each * (i + 1)].tolist()] for i in range(count)]


STEPS: dict[str, ForwardBatch] = {
    "a token": tokens([70], [0]),
    "a first token": tokens([0], [0]),
    "tokens": tokens([3, 64, 90], [0, 1, 2]),
    "tokens behind drafts": tokens([40, 41, 42, 5], [0, 0, 0, 1], shares=True),
    "a chunk of one token": prompt([1], [33]),
    "a prompt's first chunk": prompt([67], [0]),
    "chunks": prompt([1, 5], [0, 33]),
}


def _matrix(form: str, rows: int, cols: int, seed: int) -> QuantTensor:
    return random_weight(form, rows, cols // FORMATS[form].block, seed)


class Case:
    """A layer's constants, its cache with random rows, and the rows of a step."""

    def __init__(
        self,
        batch: ForwardBatch,
        cache_type: CacheType = "f16",
        form: str = "Q8_0",
        heads: int = 3,
        rank: int = 128,
        rotated: int = 32,
        plain: int = 64,
        values: int = 32,
        halves: bool = False,
        hot: bool = False,
    ) -> None:
        random = torch.Generator().manual_seed(5)
        self.batch, self.sizes = batch, (heads, rank, plain, rotated, values)
        self.absorb = [_matrix(form, rank, plain, h) for h in range(heads)]
        self.expand = [_matrix(form, values, rank, 100 + h) for h in range(heads)]
        self.rope = RopeSpec(rotated, layout="halves" if halves else "pairs")
        self.norm = torch.rand(rank, generator=random) + 0.5
        self.query_scale = torch.rand(CONTEXT, generator=random) + 0.5 if hot else None
        self.layer = allocate_layer(
            (BLOCKS + 1) * BLOCK_SIZE, 1, rank + rotated, "cpu", cache_type, latent=True
        )
        rows = torch.randn(len(self.layer.k), 1, rank + rotated, generator=random)
        write_rows(self.layer, 0, rows, rows)
        self.q = torch.randn(len(batch), heads * (plain + rotated), generator=random) * 0.3
        self.latent = torch.randn(len(batch), rank + rotated, generator=random)

    def spec(self, backend: Any) -> LatentSpec:
        """On a backend."""
        heads, rank, plain, rotated, values = self.sizes
        cos, sin = rope_table(self.rope, CONTEXT, backend.device)
        scale = self.query_scale
        return LatentSpec(
            heads=heads,
            rank=rank,
            plain=plain,
            rotated=rotated,
            values=values,
            scale=(plain + rotated) ** -0.5,
            rope_layout=self.rope.layout,
            cos=cos,
            sin=sin,
            mask_band=causal_mask_band(CONTEXT, CONTEXT, device=backend.device),
            norm=self.norm.to(backend.device),
            eps=1e-6,
            absorb=backend.down_experts(self.absorb),
            expand=backend.down_experts(self.expand),
            query_scale=None if scale is None else scale.to(backend.device),
        )

    def held(self, device: torch.device) -> KVLayer:
        """A copy of the cache on a device."""
        k = self.layer.k.clone().to(device)
        scale = None if self.layer.k_scale is None else self.layer.k_scale.clone().to(device)
        return KVLayer(k, k, scale, scale)

    def expected(self) -> tuple[Tensor, KVLayer]:
        """The definition's result in fp64, and the cache behind the step."""
        backend, layer = ReferenceBackend(keep=True), self.held(torch.device("cpu"))
        spec = self.spec(backend)
        y = backend.latent_attention(self.batch, self.q.double(), self.latent.double(), spec, layer)
        return y, layer
