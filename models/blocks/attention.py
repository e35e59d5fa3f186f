"""Rotary causal attention, declared: projections, norms, biases and sinks by name, and how ranks cut its heads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quengine.models.blocks.block import (
    BIAS,
    NORM,
    STATELESS,
    Axis,
    Cut,
    Draw,
    Mixer,
    PagedKV,
    SlotState,
    TensorSpec,
)
from quengine.models.blocks.norms import Norms
from quengine.models.rotation import RopeLayout, Rotation

_HEADS = Cut("columns", ("heads",))
OPTIONAL = ("attn_qkv.weight", "attn_sinks.weight")
"""Tensors beside biases and norms that only some models have, and that change what is computed."""

_ALL: tuple[Axis, ...] = ("queries", "keys", "keys")


@dataclass(frozen=True)
class AttentionForm:
    """What an attention has beside the projections.

    rope_layout: which elements of a head rotate together (kernels/rope.py). GGUF converters permute the query and key
        rows of the llama family so that these elements are neighbours ("pairs").
    qk_norm: a norm of queries and keys: of each "head" by itself, of each "rotated head", or of all heads in a "row".
    qkv_bias: query, key and value projections have biases.
    output_bias: the output projection has a bias.
    sinks: each query head has a logit of its own in the softmax's denominator (kernels/attention.py).
    gated: the result is multiplied by gates; each query head's rows are followed by its gates' (kernels/attention.py).
    unit_norms: each rotated query and key head is normalized without weights; layers without rotation skip this.
    merged: one tensor `attn_qkv` holds query, key and value rows.
    v_norm: value heads are divided by their root mean square.
    images_both_ways: the layers, all or only those with a window, in which rows of an image also see its later rows, if
        its projector asks for that.
    """

    rope_layout: RopeLayout = "halves"
    qk_norm: Literal["head", "rotated head", "row"] | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    sinks: bool = False
    gated: bool = False
    unit_norms: bool = False
    merged: bool = False
    v_norm: bool = False
    images_both_ways: Literal["all", "windowed"] = "all"


@dataclass(frozen=True)
class Attention(Mixer):
    """`heads` query heads of `head_dim` share `kv_heads` key and value heads.

    norms: the layer's. width: that of the residual stream. scale: multiplies the scores.
    window: how many positions a token sees, its own included; None: all before it.
    temperature: (scale, length, offset) of `ModelConfig.attention_temperature_scale`, or None.
    partial: each rank has some of the heads.
    keys_as_values: values are keys before their norm and rotation, without a projection.
    softcap: that of the scores; 0: none.
    shared: keys and values come from an earlier layer, which has as many heads of the same size.
    joins_hidden: the projections read a token's embedding and a hidden row side by side, each after its own norm
        (models/eagle.py).
    chunked: a token sees only its own chunk of `window` positions, which begins at a multiple of `window`.
    """

    form: AttentionForm
    norms: Norms
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    rotation: Rotation
    scale: float
    window: int | None = None
    temperature: tuple[float, int, int] | None = None
    partial: bool = False
    keys_as_values: bool = False
    softcap: float = 0.0
    shared: bool = False
    joins_hidden: bool = False
    chunked: bool = False
    kind = "attention"

    @property
    def traits(self) -> Sequence[str]:
        form = self.form
        traits = {
            "query/key/value biases": form.qkv_bias,
            "query/key norms": form.qk_norm is not None or form.unit_norms,
            "merged projections": form.merged,
            "attention sinks": form.sinks,
            "value norms": form.v_norm,
            "keys as values": self.keys_as_values,
            "soft-capped scores": self.softcap > 0.0,
            "keys and values of an earlier layer": self.shared,
            "within chunks of positions": self.chunked,
        }
        return [trait for trait, there in traits.items() if there]

    @property
    def state(self) -> PagedKV | SlotState:
        return STATELESS if self.shared else PagedKV(self.kv_heads, self.head_dim, self.window)

    def tensors(self) -> Mapping[str, TensorSpec]:
        found = self._projections()
        if self.norms.before_mixer:
            norm = TensorSpec((self.width,), hf="input_layernorm.weight", draw=NORM)
            found = {"attn_norm.weight": norm, **found}
        if self.norms.of_results:
            norm = TensorSpec((self.width,), hf="post_attention_layernorm.weight", draw=NORM)
            found["post_attention_norm.weight"] = norm
        if self.joins_hidden:
            norm = TensorSpec((self.width,), hf="hidden_norm.weight", draw=NORM)
            found["attn_norm_2.weight"] = norm
        found |= self._biases()
        if self.form.sinks:
            sinks = TensorSpec((self.heads,), _HEADS, "self_attn.sinks", draw=Draw(by_columns=False))
            found["attn_sinks.weight"] = sinks
        if self.form.qk_norm == "row":  # a norm of all heads together needs all heads on every rank
            found = {name: spec._replace(cut=None) for name, spec in found.items()}
        return found | self._norms()

    def joined(self) -> Mapping[str, TensorSpec]:
        """The tensors that hold query, key and value rows together, in files without separate ones."""
        if self.keys_as_values or self.shared:
            return {}
        cut, units = self.form.qk_norm != "row", (self._rows_of_queries, 1, 1)
        by_rows, by_columns = (
            (Cut("rows", _ALL, units=units), Cut("columns", _ALL, units=units)) if cut else (None, None)
        )
        return {
            "attn_qkv.weight": TensorSpec((self.rows, self.columns), by_rows, "self_attn.qkv_proj.weight"),
            "attn_qkv.bias": TensorSpec((self.rows,), by_columns, "self_attn.qkv_proj.bias", draw=BIAS),
        }

    @property
    def columns(self) -> int:
        """Columns of the projections."""
        return 2 * self.width if self.joins_hidden else self.width

    @property
    def rows(self) -> int:
        """Total rows of the query, key and value projections."""
        of_others = 0 if self.shared else 2 * self.kv_heads
        return (self._rows_of_queries * self.heads + of_others) * self.head_dim

    @property
    def _rows_of_queries(self) -> int:
        """Rows for each element of a query: 2 if each query head is followed by its gates."""
        return 2 if self.form.gated else 1

    def _projections(self) -> dict[str, TensorSpec]:
        if self.form.merged:
            found = {"attn_qkv.weight": self.joined()["attn_qkv.weight"]}
        else:
            found = {
                f"attn_{name}.weight": TensorSpec(
                    (each * heads * self.head_dim, self.columns),
                    Cut("rows", (axis,), units=(each,)),
                    f"self_attn.{name}_proj.weight",
                    rotated=None if name == "v" else (heads, self.rotation.dim),
                )
                for name, axis, heads, each in self._three()
            }
        shape, cut = (self.width, self.heads * self.head_dim), Cut("columns", ("queries",))
        return {**found, "attn_output.weight": TensorSpec(shape, cut, "self_attn.o_proj.weight")}

    def _three(self) -> Iterable[tuple[str, Axis, int, int]]:
        """(letter, axis that ranks divide, heads, rows for each element of a head) of each query, key and value
        projection that the layer has."""
        heads, each = (self.heads, self.kv_heads, self.kv_heads), (self._rows_of_queries, 1, 1)
        three = zip("qkv", _ALL, heads, each, strict=True)
        without = "kv" if self.shared else "v" if self.keys_as_values else ""
        return [one for one in three if one[0] not in without]

    def _biases(self) -> dict[str, TensorSpec]:
        found: dict[str, TensorSpec] = {}
        if self.form.qkv_bias:
            for name, axis, heads, each in self._three():
                rotated = None if name == "v" else (heads, self.rotation.dim)
                cut, hf = Cut("columns", (axis,), units=(each,)), f"self_attn.{name}_proj.bias"
                found[f"attn_{name}.bias"] = TensorSpec(
                    (each * heads * self.head_dim,), cut, hf, rotated=rotated, draw=BIAS
                )
        if self.form.output_bias:
            found["attn_output.bias"] = TensorSpec((self.width,), hf="self_attn.o_proj.bias", draw=BIAS)
        return found

    def _norms(self) -> dict[str, TensorSpec]:
        if self.form.qk_norm is None:
            return {}
        of_row = self.form.qk_norm == "row"
        counts = (self.heads, self.kv_heads) if of_row else (1, 1)
        return {
            f"attn_{name}_norm.weight": TensorSpec(
                (count * self.head_dim,), hf=f"self_attn.{name}_norm.weight", draw=NORM
            )
            for name, count in zip("qk", counts, strict=True)
            if not (self.shared and name == "k")
        }
