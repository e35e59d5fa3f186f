"""Rotary causal attention, declared: projections, norms, biases and sinks by name, and how ranks cut its heads."""

from collections.abc import Mapping
from dataclasses import dataclass

from quengine.models.blocks.block import Axis, Cut, PagedKV, TensorSpec
from quengine.models.config import BlockKind, ModelConfig, Rotation

_QUERIES, _KEYS, _HEADS = Cut("rows", ("queries",)), Cut("rows", ("keys",)), Cut("columns", ("heads",))
_ALL: tuple[Axis, ...] = ("queries", "keys", "keys")


@dataclass(frozen=True)
class Attention:
    """`heads` query heads of `head_dim` share `kv_heads` key and value heads.

    form: what it has beside the projections. width: of the residual stream. scale: multiplies the scores. window:
    positions that a token sees, its own among them; None: all before it. temperature: (scale, length), by which queries
    grow with the position (`ModelConfig.attention_temperature_scale`), or None. partial: a rank has some of the heads.
    """

    form: BlockKind
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation
    scale: float
    window: int | None = None
    temperature: tuple[float, int] | None = None
    partial: bool = False
    kind = "attention"

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "Attention":
        """The attention of a layer as the model's configuration has it."""
        scale, length = config.attention_temperature_scale, config.attention_temperature_length
        heads, kv_heads, _ = config.sizes(layer)
        return cls(
            form=config.block,
            width=config.embedding_length,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=config.head_dim,
            rotation=config.rotation(layer),
            scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            window=config.layer_windows[layer],
            temperature=(scale, length) if scale else None,
            partial=config.ranks > 1 and config.splits_heads,
        )

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
        rows, cut = (self.heads + 2 * self.kv_heads) * self.head_dim, self.form.qk_norm != "row"
        return {
            "attn_qkv.weight": TensorSpec((rows, self.width), Cut("rows", _ALL) if cut else None),
            "attn_qkv.bias": TensorSpec((rows,), Cut("columns", _ALL) if cut else None),
        }

    def _projections(self) -> dict[str, TensorSpec]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.form.merged:
            found = {"attn_qkv.weight": self.joined()["attn_qkv.weight"]}
        else:
            found = {
                "attn_q.weight": TensorSpec((queries, self.width), _QUERIES),
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
