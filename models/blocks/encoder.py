"""The layers of encoders, declared: attention to both sides and a feed-forward.

BERT's layers have a LayerNorm of each sum (`EncoderAttention`, `EncoderFeedForward`). The others are a decoder's layers
with attention that is not causal (`BidirectionalAttention`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quengine.models.blocks.attention import Attention
from quengine.models.blocks.block import BIAS, NORM, Block, ChannelMixer, Mixer, PagedKV, TensorSpec
from quengine.models.blocks.uniform import uniform_layers
from quengine.models.config import ModelConfig
from quengine.models.rotation import Rotation


def _with_bias(name: str, hf: str, rows: int, cols: int, has_bias: bool = True) -> dict[str, TensorSpec]:
    bias = {f"{name}.bias": TensorSpec((rows,), hf=f"{hf}.bias", draw=BIAS)} if has_bias else {}
    return {f"{name}.weight": TensorSpec((rows, cols), hf=f"{hf}.weight"), **bias}


def layer_norm_specs(name: str, hf: str, width: int) -> dict[str, TensorSpec]:
    return {
        f"{name}.weight": TensorSpec((width,), hf=f"{hf}.weight", draw=NORM),
        f"{name}.bias": TensorSpec((width,), hf=f"{hf}.bias", draw=BIAS),
    }


@dataclass(frozen=True)
class EncoderAttention(Mixer):
    """`heads` heads of `head_dim`. Nothing is kept of a text: its KV cache has 0 heads.

    rotation: of queries and keys; None: there is none. merged: one matrix has the query, key and value rows.
    """

    width: int
    heads: int
    head_dim: int
    biases: bool
    rotation: Rotation | None = None
    merged: bool = False
    kind = "attention"
    window = None

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def traits(self) -> Sequence[str]:
        return ("bidirectional attention",)

    @property
    def state(self) -> PagedKV:
        return PagedKV(0, self.head_dim)

    def tensors(self) -> Mapping[str, TensorSpec]:
        found: dict[str, TensorSpec] = dict(self._merged()) if self.merged else {}
        three = zip("qkv", ("query", "key", "value"), strict=True)
        for letter, module in () if self.merged else three:
            rows = self.heads * self.head_dim
            found |= _with_bias(f"attn_{letter}", f"attention.self.{module}", rows, self.width, self.biases)
        found |= _with_bias(
            "attn_output", "attention.output.dense", self.width, self.heads * self.head_dim, self.biases
        )
        return found | layer_norm_specs("attn_output_norm", "attention.output.LayerNorm", self.width)

    def joined(self) -> Mapping[str, TensorSpec]:
        return {} if self.merged else self._merged()

    def _merged(self) -> Mapping[str, TensorSpec]:
        rows = 3 * self.heads * self.head_dim
        return _with_bias("attn_qkv", "attention.self.qkv", rows, self.width, self.biases)


@dataclass(frozen=True)
class EncoderFeedForward(ChannelMixer):
    """gelu(up) of `length` elements, or if `gated` silu(gate) * up, then down to `width`."""

    width: int
    length: int
    biases: bool
    gated: bool = False

    @property
    def every_row_length(self) -> int:
        return self.length

    def tensors(self) -> Mapping[str, TensorSpec]:
        up = _with_bias("ffn_up", "intermediate.dense", self.length, self.width, self.biases)
        down = _with_bias("ffn_down", "output.dense", self.width, self.length, self.biases)
        gate = TensorSpec((self.length, self.width), hf="intermediate.gate.weight")
        up |= {"ffn_gate.weight": gate} if self.gated else {}
        return {**up, **down, **layer_norm_specs("layer_output_norm", "output.LayerNorm", self.width)}


@dataclass(frozen=True)
class BidirectionalAttention(Mixer):
    """A decoder's attention whose positions also see later ones; with a window W they see those at most W // 2 away.
    Nothing is kept of a text: its KV cache has 0 heads. normed: whether a norm comes before it."""

    causal: Attention
    normed: bool = True
    kind = "attention"

    @property
    def traits(self) -> Sequence[str]:
        return ("bidirectional attention", *self.causal.traits)

    @property
    def state(self) -> PagedKV:
        return PagedKV(0, self.causal.head_dim)

    @property
    def reach(self) -> int | None:
        """The distance of the farthest position that a position sees; None: it sees all of the text."""
        return None if self.causal.window is None else self.causal.window // 2

    def tensors(self) -> Mapping[str, TensorSpec]:
        found = self.causal.tensors()
        return {name: spec for name, spec in found.items() if self.normed or name != "attn_norm.weight"}

    def joined(self) -> Mapping[str, TensorSpec]:
        return self.causal.joined()


def bidirectional_layers(config: ModelConfig, first_normed: bool = True) -> Sequence[Block]:
    """A decoder's layers with BidirectionalAttention. first_normed: whether it has a norm in the first layer."""
    layers = enumerate(uniform_layers(config))
    found = []
    for i, block in layers:
        assert isinstance(block.mixer, Attention)
        mixer = BidirectionalAttention(block.mixer, first_normed or i > 0)
        found.append(Block(mixer, block.feed_forward))
    return found
