"""Rotary causal attention, declared: projections, norms, biases and sinks by name, and how ranks cut its heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from quengine.models.blocks.block import Axis, Cut, PagedKV, TensorSpec
from quengine.models.config import BlockKind, ModelConfig

_KEYS, _HEADS = Cut("rows", ("keys",)), Cut("columns", ("heads",))
_ALL: tuple[Axis, ...] = ("queries", "keys", "keys")


@dataclass(frozen=True)
class Attention:
    """`heads` query heads of `head_dim` share `kv_heads` key and value heads; see BlockKind for what `kind_of` says.

    width: of the residual stream. window: positions that a token sees, its own among them; None: all before it.
    """

    config: ModelConfig
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    kind = "attention"

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "Attention":
        """The attention of a layer, in a model whose layers with attention have the same sizes."""
        sizes = (config.embedding_length, config.head_count, config.head_count_kv, config.head_dim)
        return cls(config, *sizes, config.layer_windows[layer])

    @property
    def form(self) -> BlockKind:
        """What it has beside the projections."""
        return self.config.block

    @property
    def state(self) -> PagedKV:
        return PagedKV(self.kv_heads, self.head_dim, self.window)

    def tensors(self) -> Mapping[str, TensorSpec]:
        found = self._projections()
        if self.form.norms != "post":
            found = {"attn_norm.weight": TensorSpec((self.width,)), **found}
        if self.form.norms != "pre":
            found["post_attention_norm.weight"] = TensorSpec((self.width,))
        found |= self._biases()
        if self.form.sinks:
            found["attn_sinks.weight"] = TensorSpec((self.heads,), _HEADS)
        if self.form.qk_norm == "row":  # a norm of all heads together needs all heads on every rank
            found = {name: TensorSpec(spec.shape) for name, spec in found.items()}
        return found | self._norms()

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensors that hold query, key and value rows together, in files that do not have three."""
        each, cut = self._rows_of_queries, self.form.qk_norm != "row"
        rows = (each * self.heads + 2 * self.kv_heads) * self.head_dim
        units = (each, 1, 1)
        return {
            "attn_qkv.weight": TensorSpec(
                (rows, self.width), Cut("rows", _ALL, units=units) if cut else None
            ),
            "attn_qkv.bias": TensorSpec((rows,), Cut("columns", _ALL, units=units) if cut else None),
        }

    @property
    def _rows_of_queries(self) -> int:
        """Rows for each element of a query: output gates lie between the queries."""
        return 2 if self.form.gated else 1

    def _projections(self) -> dict[str, TensorSpec]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.form.merged:
            found = {"attn_qkv.weight": self.joined()["attn_qkv.weight"]}
        else:
            each = self._rows_of_queries
            cut = Cut("rows", ("queries",), units=(each,))
            found = {
                "attn_q.weight": TensorSpec((each * queries, self.width), cut),
                "attn_k.weight": TensorSpec((keys, self.width), _KEYS),
                "attn_v.weight": TensorSpec((keys, self.width), _KEYS),
            }
        return {
            **found,
            "attn_output.weight": TensorSpec((self.width, queries), Cut("columns", ("queries",))),
        }

    def _biases(self) -> dict[str, TensorSpec]:
        found: dict[str, TensorSpec] = {}
        if self.form.qkv_bias:
            for name, axis in zip("qkv", _ALL, strict=True):
                rows = self.head_dim * (self.heads if axis == "queries" else self.kv_heads)
                found[f"attn_{name}.bias"] = TensorSpec((rows,), Cut("columns", (axis,)))
        if self.form.output_bias:
            found["attn_output.bias"] = TensorSpec((self.width,))
        return found

    def _norms(self) -> dict[str, TensorSpec]:
        if self.form.qk_norm is None:
            return {}
        of_row = self.form.qk_norm == "row"
        counts = (self.heads, self.kv_heads) if of_row else (1, 1)
        return {
            f"attn_{name}_norm.weight": TensorSpec((count * self.head_dim,))
            for name, count in zip("qk", counts, strict=True)
        }
