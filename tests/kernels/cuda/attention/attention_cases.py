"""What the tests of attention have in common: a layer's settings, and a paged cache with something in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quengine.kernels.attention import causal_mask_band
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cuda.attention.attention_prefill import attention_prefill, prefill_tiles
from quengine.kernels.cuda.attention.rope_store import rope_store
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.hadamard import hadamard
from quengine.kernels.kv.cache_types import BLOCK_SIZE, CacheType
from quengine.kernels.kv.kv_codes import dequantize_rows
from quengine.kernels.kv.kv_rows import allocate_layer, slot_mapping, write_rows
from quengine.kernels.rope import RopeSpec, apply_rope, rope_table


def make_spec(
    device: torch.device,
    context: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None = None,
    layout: str = "pairs",
    rope_dim: int | None = None,
    norms: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    sinks: torch.Tensor | None = None,
    norms_rotated: bool = False,
) -> AttentionSpec:
    """`norms`: weights of the queries' and of the keys' norm."""
    cos, sin = rope_table(RopeSpec(dim=rope_dim or head_dim), context, device)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        rope_layout=layout,
        cos=cos,
        sin=sin,
        mask_band=causal_mask_band(140, context, window, device),
        q_norm=norms[0],
        k_norm=norms[1],
        norms_rotated=norms_rotated,
        eps=1e-6,
        sinks=None if sinks is None else sinks.to(device),
    )


def sinks_near(sink: float, heads: int) -> torch.Tensor:
    """A logit for each head, all different: fp32 [heads]."""
    return sink * (1.0 + 0.1 * torch.arange(heads))


@dataclass(frozen=True)
class PagedCache:
    """One layer's cache and the block table of each sequence, int32 [sequences, blocks]."""

    layer: KVLayer
    tables: torch.Tensor

    @classmethod
    def empty(
        cls,
        device: torch.device,
        sequences: int,
        context: int,
        kv_heads: int,
        head_dim: int,
        cache_type: CacheType = "f16",
        padding: int = 0,
    ) -> "PagedCache":
        """Blocks in order; `padding` blocks are behind those of the sequences. All is NaN: rows that are not written
        must not be read."""
        blocks = -(-context // BLOCK_SIZE)
        count = sequences * blocks
        layer = allocate_layer((count + padding) * BLOCK_SIZE, kv_heads, head_dim, device, cache_type)
        for tensor in layer.tensors:
            tensor.fill_(float("nan") if tensor.dtype == torch.float16 else 77)
        tables = torch.arange(count, dtype=torch.int32, device=device).view(sequences, blocks)
        return cls(layer, tables)

    def planes(self) -> list[torch.Tensor]:
        """What is stored, by sequence: each [sequences, context, kv_heads, ...]."""
        blocks = self.tables.long()
        return [t.unflatten(0, (-1, BLOCK_SIZE))[blocks].flatten(1, 2) for t in self.layer.tensors]

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values fp64, each [sequences, context, kv_heads, head_dim], transformed back where they are stored
        transformed."""
        k, v, *scales = self.planes()
        if scales:
            k, v = dequantize_rows(k, scales[0]), dequantize_rows(v, scales[1])
        k, v = k.double(), v.double()
        return (hadamard(k), hadamard(v)) if self.layer.format.hadamard else (k, v)

    def shuffled(self, padding: int = 0) -> "PagedCache":
        """The same sequences, in blocks in no order with `padding` blocks among them, whose bytes are 77."""
        sequences, blocks = self.tables.shape
        count = sequences * blocks + padding
        order = torch.randperm(count, generator=torch.Generator().manual_seed(4)).to(self.tables.device)
        kv_heads, head_dim = self.layer.k.shape[1], self.layer.head_dim
        layer = allocate_layer(
            count * BLOCK_SIZE, kv_heads, head_dim, self.tables.device, self.layer.cache_type
        )
        tables = order[: sequences * blocks].view(sequences, blocks)
        for tensor, plane in zip(layer.tensors, self.planes(), strict=True):
            tensor.fill_(77)
            tensor.unflatten(0, (-1, BLOCK_SIZE))[tables] = plane.unflatten(1, (blocks, BLOCK_SIZE))
        return PagedCache(layer, tables.to(torch.int32))

    def sequence(self, index: int) -> torch.Tensor:
        """The block tables of one sequence alone."""
        return self.tables[index : index + 1].contiguous()


def filled_cache(
    device: torch.device,
    sequences: int,
    context: int,
    kv_heads: int,
    head_dim: int,
    cache_type: CacheType = "f16",
) -> PagedCache:
    generator = torch.Generator().manual_seed(head_dim + kv_heads)
    cache = PagedCache.empty(device, sequences, context, kv_heads, head_dim, cache_type)
    shape = (*cache.layer.k.shape[:2], head_dim)
    k, v = (torch.randn(shape, generator=generator).to(device) for _ in range(2))
    write_rows(cache.layer, 0, k, v)
    return cache


def rotate_and_write(
    qkv: torch.Tensor,
    spec: AttentionSpec,
    layer: KVLayer,
    positions: torch.Tensor,
    tables: torch.Tensor,
    sequences: torch.Tensor,
) -> torch.Tensor:
    """What `rope_store` does for heads without a norm, by the definitions. Its launch has a program for every row and
    few heads, on which the interpreter spends several times what the attention behind it takes."""
    at = positions.long()
    q, k, v = (
        qkv.float().unflatten(1, (-1, spec.head_dim)).split([spec.heads, spec.kv_heads, spec.kv_heads], 1)
    )
    q, k = (apply_rope(heads, spec.cos[at], spec.sin[at], spec.rope_layout) for heads in (q, k))
    write_rows(layer, slot_mapping(at, tables.long()[sequences.long()]), k, v)
    q = hadamard(q) if layer.format.hadamard else q
    return q.half().contiguous()


def run_prefill(
    spec: AttentionSpec,
    layer: KVLayer,
    qkv: torch.Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    tables: torch.Tensor,
    batch_invariant: bool = False,
    rotate: Callable[..., torch.Tensor] = rope_store,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step of chunks, each of `lengths` rows of qkv at its position in `starts` and with its row of `tables`: rotate,
    store and attend. The rotated queries fp16, and fp32 [T, heads * head_dim]."""
    batch = prefill_batch(
        [[0] * length for length in lengths], starts, [[table] for table in tables.tolist()], qkv.device
    )
    tiles = prefill_tiles(batch, batch_invariant)
    q = rotate(qkv, spec, layer, batch.positions, batch.block_tables_of(0), tiles.sequences)
    out = torch.full((len(qkv), spec.heads * spec.head_dim), float("nan"), device=qkv.device)
    gates = qkv if spec.gated else None
    tables = batch.block_tables_of(0)
    return q, attention_prefill(q, spec, layer, tables, tiles, out, batch_invariant, gates=gates)


def run_chunks(
    spec: AttentionSpec,
    layer: KVLayer,
    qkv: torch.Tensor,
    chunks: Sequence[int],
    tables: torch.Tensor,
    batch_invariant: bool = False,
    rotate: Callable[..., torch.Tensor] = rope_store,
) -> torch.Tensor:
    """One sequence, with block tables [1, blocks], chunk by chunk from position 0 on."""
    outputs, start = [], 0
    for size in chunks:
        rows = qkv[start : start + size]
        outputs.append(run_prefill(spec, layer, rows, [start], [size], tables, batch_invariant, rotate)[1])
        start += size
    return torch.cat(outputs)
