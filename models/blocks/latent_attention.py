"""Latent attention (DeepSeek-V2 and what followed it), declared.

One projection gives a latent, from which keys and values of all heads are made, beside key elements that are rotated
and shared by all heads; another gives queries, or a latent of their own, from which they are made. A matrix of each
head, `attn_k_b`, brings its query to the latent's elements, another, `attn_v_b`, makes its value of a sum of latents
(kernels/latent_attention.py). Source: `DeepseekV2Attention` in the `transformers` library; llama.cpp's converter for
the names and orders of GGUF files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quengine.models.blocks.block import NORM, Mixer, PagedKV, TensorSpec
from quengine.models.rotation import Rotation

_HF = "self_attn"
"""The module in a Hugging Face layer."""


@dataclass(frozen=True)
class LatentSizes:
    """The sizes of a latent attention.

    query_rank: of the latent that queries are made of; 0: they are made of the hidden row. rank: of the latent that
    keys and values are made of. plain, rotated: elements of a query that are not and that are rotated. values: elements
    of a head's value. eps: of the norms of both latents.
    """

    query_rank: int
    rank: int
    plain: int
    rotated: int
    values: int
    eps: float


@dataclass(frozen=True)
class LatentAttention(Mixer):
    """width: of the residual stream. heads: of queries. scale, temperature: as in blocks/attention.py."""

    width: int
    heads: int
    sizes: LatentSizes
    rotation: Rotation
    scale: float
    temperature: tuple[float, int, int] | None = None
    kind = "latent attention"
    window = None
    kv_heads = 1

    @property
    def head_dim(self) -> int:
        """Elements of a cached row, which is the key of all heads."""
        return self.sizes.rank + self.sizes.rotated

    @property
    def traits(self) -> Sequence[str]:
        return ("latent queries",) if self.sizes.query_rank else ()

    @property
    def state(self) -> PagedKV:
        return PagedKV(1, self.head_dim, latent=True)

    @property
    def rows(self) -> int:
        """The most rows of the projections of a hidden row or of the queries' latent."""
        sizes = self.sizes
        return max(self.query_rows, (sizes.query_rank or self.query_rows) + self.head_dim)

    @property
    def query_rows(self) -> int:
        """Rows of the matrix that gives queries."""
        return self.heads * (self.sizes.plain + self.sizes.rotated)

    def tensors(self) -> Mapping[str, TensorSpec]:
        sizes, width = self.sizes, self.width
        return {
            "attn_norm.weight": TensorSpec((width,), hf="input_layernorm.weight", draw=NORM),
            **self._queries(),
            "attn_kv_a_mqa.weight": TensorSpec((self.head_dim, width), hf=f"{_HF}.kv_a_proj_with_mqa.weight"),
            "attn_kv_a_norm.weight": TensorSpec((sizes.rank,), hf=f"{_HF}.kv_a_layernorm.weight", draw=NORM),
            "attn_k_b.weight": TensorSpec((self.heads, sizes.rank, sizes.plain)),
            "attn_v_b.weight": TensorSpec((self.heads, sizes.values, sizes.rank)),
            "attn_output.weight": TensorSpec((width, self.heads * sizes.values), hf=f"{_HF}.o_proj.weight"),
        }

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensor that has for each head its keys' rows and then its values', of the latent: attn_k_b, which it has
        the other way round, and attn_v_b. In folders, and in GGUF files of before April 2025."""
        rows = self.heads * (self.sizes.plain + self.sizes.values)
        return {"attn_kv_b.weight": TensorSpec((rows, self.sizes.rank), hf=f"{_HF}.kv_b_proj.weight")}

    def _queries(self) -> dict[str, TensorSpec]:
        rank = self.sizes.query_rank
        if not rank:
            return {"attn_q.weight": TensorSpec((self.query_rows, self.width), hf=f"{_HF}.q_proj.weight")}
        return {
            "attn_q_a.weight": TensorSpec((rank, self.width), hf=f"{_HF}.q_a_proj.weight"),
            "attn_q_a_norm.weight": TensorSpec((rank,), hf=f"{_HF}.q_a_layernorm.weight", draw=NORM),
            "attn_q_b.weight": TensorSpec((self.query_rows, rank), hf=f"{_HF}.q_b_proj.weight"),
        }
