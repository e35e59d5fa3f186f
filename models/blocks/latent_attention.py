"""Latent attention (DeepSeek-V2 and what followed it), declared.

One projection gives a latent, from which the keys and values of all heads are made, and rotated key elements that all
heads share. Another gives the queries, or a latent from which they are made. Each head has two matrices: `attn_k_b`
maps its query to the latent's elements, `attn_v_b` maps a weighted sum of latents to its value
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

    query_rank: elements of the latent for queries; 0: queries are made of the hidden row. rank: elements of the latent
    for keys and values. plain, rotated: unrotated and rotated elements of a head's query. values: elements of a head's
    value. eps: of the norms of both latents.
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
        """Rows of the larger of two projections: that of the hidden row, and that of the latent for queries."""
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
        """The tensor that has, for each head, the transposed rows of attn_k_b and then those of attn_v_b: in folders,
        and in GGUF files from before April 2025."""
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
