"""The cases of ahead-of-time compilation for latent attention, at the shapes of released models."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from quengine.kernels.cuda.aot.meta_backend import META, MetaBackend, empty, stored
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.cuda.gemm.fp16_operand import ScaledProduct
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CACHE_TYPES, CacheType
from quengine.kernels.kv.kv_rows import allocate_layer
from quengine.kernels.latent_spec import LatentSpec
from quengine.kernels.rope import RopeLayout

LatentCase: TypeAlias = tuple[str, bool, tuple[int, ...], Callable[[CudaBackend], object]]
"""The fields of a Case (aot_cases.py)."""

_EPS = 1e-6


@dataclass(frozen=True)
class Latent:
    """Query heads, elements of the latent, of queries that are not and that are rotated, and of values; types of the
    heads' matrices."""

    heads: int
    rank: int
    plain: int
    rotated: int
    values: int
    types: tuple[str, str] = ("Q8_0", "Q4_K")
    layout: RopeLayout = "pairs"
    hot: bool = False


MODELS = {
    "glm-4.7-flash": Latent(20, 512, 192, 64, 256),
    "deepseek-v3": Latent(128, 512, 128, 64, 128),
    "mistral-small-4": Latent(32, 256, 64, 64, 128, hot=True),
    "halves, floats": Latent(16, 128, 32, 32, 32, ("F16", "F16"), "halves"),
}


def latent_cases(
    steps: dict[str, ForwardBatch], archs: tuple[int, ...], fixed: Callable[..., object]
) -> Iterator[LatentCase]:
    """steps: by name; fixed: makes a call's backend batch-invariant."""
    for model, latent in MODELS.items():
        main = model == "glm-4.7-flash"
        for cache_type in CACHE_TYPES:
            for name, batch in steps.items():
                call = partial(_layer, latent, cache_type, batch)
                # Other GPUs than Hopper's cut a prompt into tiles of fewer rows than a small latent's.
                cut = model == "mistral-small-4" and batch.phase == "prefill"
                of = archs if main else (80, 90) if cut else (90,)
                yield (
                    f"latent {model} {cache_type}, {name}",
                    batch.phase == "decode" and len(batch) <= 8,
                    of,
                    call,
                )
                if main and cache_type == "f16" and not batch.shares_sequences:
                    yield f"deterministic latent {model}, {name}", False, of, partial(fixed, call)


def _layer(latent: Latent, cache_type: CacheType, batch: ForwardBatch, backend: MetaBackend) -> None:
    """The step of one layer, between its projections."""
    heads, table = latent.heads, empty(4096, latent.rotated // 2)
    absorb, expand = latent.types
    spec = LatentSpec(
        heads=heads, rank=latent.rank, plain=latent.plain, rotated=latent.rotated, values=latent.values, scale=0.1,
        rope_layout=latent.layout, cos=table, sin=table, mask_band=empty(1, 1, dtype=torch.bool),
        norm=empty(latent.rank), eps=_EPS,
        absorb=backend.down_experts([stored(absorb, latent.rank, latent.plain)] * heads),
        expand=backend.down_experts([stored(expand, latent.values, latent.rank)] * heads),
        query_scale=empty(4096) if latent.hot else None,
    )  # fmt: skip
    backend.check_latent(spec)
    backend.weight([stored("Q8_0", 16, 128)])  # room for a workspace
    layer = allocate_layer(4096, 1, spec.row, META, cache_type, latent=True)
    rows, scale = len(batch), empty(len(batch))
    q, latents = empty(rows, heads * spec.query), empty(rows, spec.row)
    if rows > 1:
        products = ScaledProduct(q, scale, 1.0), ScaledProduct(latents, scale, 1.0)
        backend.latent_attention(batch, *products, spec, layer)
    backend.latent_attention(batch, q, latents, spec, layer)
