"""The type of each tensor of a model in a mix such as Q4_K_M: llama.cpp's rules.

A mix has one type for most matrices. More bits go to the output matrix (or the token embedding that stands for it), and
to attn_v, attn_output and ffn_down of all or some layers. "Outer layers" are the first and last eighth and every third
layer between. Models with 8 experts keep more bits for attention matrices, which are small beside the experts. Tests
compare the result with `llama-quantize`, tensor by tensor (`tests/models/quantize/test_mixes.py`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from quengine.errors import EngineError, nearest
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.quantize.quantize import WRITTEN
from quengine.models.gguf.header import GGUFTensor
from quengine.models.gguf.tensor_types import TYPE_BY_NAME


@dataclass(frozen=True)
class Mix:
    """A mix of types. number: `general.file_type` (llama.h, llama_ftype). base: the type of most matrices."""

    name: str
    number: int
    base: str


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        name: Mix(name, number, base)
        for name, number, base in (
            ("F32", 0, "F32"),
            ("F16", 1, "F16"),
            ("BF16", 32, "BF16"),
            ("Q8_0", 7, "Q8_0"),
            ("Q4_0", 2, "Q4_0"),
            ("Q4_1", 3, "Q4_1"),
            ("Q5_0", 8, "Q5_0"),
            ("Q5_1", 9, "Q5_1"),
            ("Q2_K", 10, "Q2_K"),
            ("Q2_K_S", 21, "Q2_K"),
            ("Q3_K_S", 11, "Q3_K"),
            ("Q3_K_M", 12, "Q3_K"),
            ("Q3_K_L", 13, "Q3_K"),
            ("Q4_K_S", 14, "Q4_K"),
            ("Q4_K_M", 15, "Q4_K"),
            ("Q5_K_S", 16, "Q5_K"),
            ("Q5_K_M", 17, "Q5_K"),
            ("Q6_K", 18, "Q6_K"),
            ("IQ4_NL", 25, "IQ4_NL"),
            ("IQ4_XS", 30, "IQ4_XS"),
            ("IQ1_S", 24, "IQ1_S"),
            ("IQ1_M", 31, "IQ1_M"),
            ("IQ2_XXS", 19, "IQ2_XXS"),
            ("IQ2_XS", 20, "IQ2_XS"),
            ("IQ2_S", 28, "IQ2_XS"),
            ("IQ2_M", 29, "IQ2_S"),
            ("IQ3_XXS", 23, "IQ3_XXS"),
            ("IQ3_XS", 22, "IQ3_S"),
            ("IQ3_S", 26, "IQ3_S"),
            ("IQ3_M", 27, "IQ3_S"),
            ("TQ1_0", 36, "TQ1_0"),
            ("TQ2_0", 37, "TQ2_0"),
            ("Q1_0", 40, "Q1_0"),
            ("Q2_0", 41, "Q2_0"),
            ("MXFP4_MOE", 38, "MXFP4"),
        )
    }
)
_ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M", "MXFP4": "MXFP4_MOE"}
_IQ2_S = ("IQ2_S", "IQ2_M")
_LOWEST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", *_IQ2_S)
"""Mixes of about two bits, whose rules are their own."""
_NEEDS_IMPORTANCE = frozenset(("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"))
TYPES = WRITTEN
"""Types that a user can give to tensors."""

_FALLBACKS = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
    **dict.fromkeys((*sorted(_NEEDS_IMPORTANCE), "IQ3_S", "IQ4_XS"), "IQ4_NL"),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), "Q4_0"),
}
"""The type with blocks of 32 for rows that are no multiple of 256."""

_KEPT = (
    *(
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ffn_gate_tid2eid.weight",
        "altup",
        "laurel",
        "per_layer_model_proj",
    ),
    *("ssm_conv1d", "shortconv.conv.weight", "indexer.k_proj.weight", "indexer.q_proj.weight"),
    *(
        f"time_mix_{part}.weight"
        for part in ("first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1")
    ),
    *(f"time_mix_{part}.weight" for part in ("g2", "decay_w1", "decay_w2", "lerp_fused")),
    *(
        "attn_rel_b.weight",
        ".position_embd",
        "sam.pos_embd",
        "sam.neck.",
        "sam.net_",
        ".rel_pos",
        ".patch_embd",
    ),
    *(".patch_merger", "a.rvq.codebook", "mm.a.code_embd"),
)
"""Parts of the names of tensors that keep their type: they are small, or read by operations that take floats."""
_WHOLE_KEPT = ("position_embd.weight", "token_types.weight")


def mix_of(name: str) -> Mix:
    """The mix of this name, in upper or lower case. Raises EngineError if there is none."""
    upper = name.upper()
    upper = _ALIASES.get(upper, upper)
    if upper in MIXES:
        return MIXES[upper]
    raise EngineError(f"no type {name}: {', '.join(MIXES)}{nearest(upper, MIXES)}")


def type_named(name: str) -> str:
    """The tensor type of this name, in upper or lower case. Raises EngineError as `mix_of`."""
    upper = name.upper()
    if upper in TYPES:
        return upper
    raise EngineError(f"no tensor type {name}: {', '.join(TYPES)}{nearest(upper, TYPES)}")


def needs_importance(name: str, kind: str, mix: str) -> bool:
    """Whether a tensor of this type is poor without an imatrix (llama-quantize refuses it then)."""
    if _category(name) in ("output", "token_embd"):
        return False
    return kind in _NEEDS_IMPORTANCE or (kind == "Q2_K" and mix == "Q2_K_S")


@dataclass(frozen=True)
class Overrides:
    """The user's choices of types.

    output, token_embedding: types of output.weight and of the token embedding. patterns: regular expressions that are
    searched for in names, each with a type; the first one found decides. pure: every matrix gets the mix's type,
    without its rules.
    """

    output: str | None = None
    token_embedding: str | None = None
    patterns: Sequence[tuple[re.Pattern[str], str]] = ()
    pure: bool = False


@dataclass(frozen=True)
class ModelTraits:
    """The numbers that the rules look at: of layers, of experts (0: none), and of query heads for each KV head."""

    architecture: str
    layers: int
    experts: int
    heads: int
    kv_heads: int

    @property
    def grouping(self) -> int:
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def is_70b(self) -> bool:
        """Whether llama.cpp counts the model as a 70B, whose attn_v is small beside the rest."""
        if self.architecture == "llama":
            return self.layers == 80 and self.heads != self.kv_heads
        sizes = {"qwen2": 80, "olmo": 80, "deci": 80, "jais2": 68}
        return self.layers == sizes.get(self.architecture)


def choose_types(
    tensors: Sequence[GGUFTensor], mix: Mix, traits: ModelTraits, overrides: Overrides, has_imatrix: bool
) -> dict[str, str]:
    """The type of each tensor. `tensors` must be in `file_order`, as the rules count layers by it. `fitting` gives the
    type to use instead where rows are not whole blocks.

    Raises:
        EngineError: a pattern is found in no name.
    """
    rules = _Rules(mix, traits, has_imatrix, _count_value_matrices(tensors), _is_tied(tensors))
    types = {tensor.name: _type_of(tensor, mix, overrides, rules) for tensor in tensors}
    for pattern, kind in overrides.patterns:
        if not any(pattern.search(name) for name in types):
            raise EngineError(f"--tensor-type {pattern.pattern}={kind}: no tensor's name has that in it")
    return types


def file_order(name: str) -> tuple[int, str]:
    """The key that sorts names as in llama.cpp's files: tensors outside of layers first, then layer by layer."""
    found = re.match(r"blk\.(\d+)\.", name)
    return (int(found[1]) if found else -1, name)


def is_quantizable(tensor: GGUFTensor) -> bool:
    """Whether a mix changes the type: matrices of weights, but none of `_KEPT`."""
    name = tensor.name
    dimensions = len(tensor.shape) - next(
        (i for i, n in enumerate(tensor.shape) if n != 1), len(tensor.shape)
    )
    if dimensions < 2 or not name.endswith("weight") or name in _WHOLE_KEPT:
        return False
    return not any(part in name for part in _KEPT)


def _count_value_matrices(tensors: Sequence[GGUFTensor]) -> int:
    return sum(_category(tensor.name) in _VALUE_LIKE for tensor in tensors)


def _is_tied(tensors: Sequence[GGUFTensor]) -> bool:
    return all(tensor.name != "output.weight" for tensor in tensors)


_CATEGORIES = (
    *(
        "attn_qkv.weight",
        "attn_kv_b.weight",
        "attn_v.weight",
        "attn_k.weight",
        "attn_q.weight",
        "attn_output.weight",
    ),
    *("ffn_up", "ffn_gate", "ffn_down"),
)
_VALUE_LIKE = ("attn_qkv", "attn_kv_b", "attn_v")


def _category(name: str) -> str:
    if name == "output.weight":
        return "output"
    if name in ("token_embd.weight", "per_layer_token_embd.weight"):
        return "token_embd"
    return next((part.removesuffix(".weight") for part in _CATEGORIES if part in name), "other")


def _type_of(tensor: GGUFTensor, mix: Mix, overrides: Overrides, rules: "_Rules") -> str:
    if not is_quantizable(tensor):
        return tensor.type_name
    category = _category(tensor.name)
    named = next((kind for pattern, kind in overrides.patterns if pattern.search(tensor.name)), None)
    if overrides.token_embedding and category == "token_embd":
        if tensor.name != "per_layer_token_embd.weight" or named is None:
            return overrides.token_embedding
    elif overrides.output and category == "output":
        return overrides.output
    if not FORMATS[mix.base].is_quantized:
        return mix.base
    if named is not None:
        return named
    if overrides.pure:
        return mix.base
    if overrides.output and category == "token_embd" and rules.tied:
        return overrides.output
    return rules.choose(tensor, category)


def fitting(tensor: GGUFTensor, kind: str) -> str:
    """`kind`, or the type that replaces it if the tensor's rows are not whole blocks of `kind`."""
    columns = tensor.shape[-1]
    if columns % TYPE_BY_NAME[kind].block == 0:
        return kind
    kind = _FALLBACKS.get(kind, kind)
    return kind if columns % TYPE_BY_NAME[kind].block == 0 else "F16"


@dataclass
class _Rules:
    """The rules of a mix, which count attn_v and ffn_down matrices in the order of calls."""

    mix: Mix
    traits: ModelTraits
    has_imatrix: bool
    value_count: int
    tied: bool
    _seen: dict[str, int] = field(default_factory=dict)

    def choose(self, tensor: GGUFTensor, category: str) -> str:
        name = self.mix.name
        if category == "output" or (self.tied and category == "token_embd"):
            return self._output(tensor)
        if name == "MXFP4_MOE":
            return "MXFP4" if len(tensor.shape) > 2 and tensor.shape[-3] > 1 else "Q8_0"
        if category == "token_embd":
            return self._token_embedding()
        if name in _LOWEST:
            return self._lowest(category)
        if category in _VALUE_LIKE:
            return self._value()
        if category in ("attn_k", "attn_q"):
            if category == "attn_k" and self.traits.experts == 8:
                return "Q8_0"
            return {"IQ3_XS": "IQ3_XXS", "IQ3_XXS": "IQ2_S"}.get(name, self.mix.base)
        if category == "ffn_down":
            return self._down(self._layer(category, tensor.name))
        if category in ("ffn_gate", "ffn_up"):
            return self._gate_or_up(self._layer(category, tensor.name))
        return self._attention_output() if category == "attn_output" else self.mix.base

    def _output(self, tensor: GGUFTensor) -> str:
        base = self.mix.base
        if base in ("Q8_0", "MXFP4") or self.traits.architecture == "falcon":
            return "Q8_0"
        if tensor.shape[-1] % TYPE_BY_NAME[base].block:
            return "Q8_0"
        return "Q5_K" if self.mix.name in (*_LOWEST, "IQ3_XXS") else "Q6_K"

    def _token_embedding(self) -> str:
        name = self.mix.name
        if name in (*_IQ2_S, "IQ3_XXS"):
            return "IQ3_S"
        if name in _LOWEST:
            return "Q2_K"
        return "Q4_K" if name in ("TQ1_0", "TQ2_0", "Q2_0") else self.mix.base

    def _lowest(self, category: str) -> str:
        base, experts = self.mix.base, self.traits.experts
        bigger = "IQ3_S" if self.mix.name in _IQ2_S else "Q2_K"
        if category in _VALUE_LIKE:
            return "Q4_K" if self.traits.grouping >= 4 or experts >= 4 else bigger
        if category == "attn_k":
            return "Q4_K" if experts == 8 else base
        if category == "ffn_down":
            return bigger if self._next("ffn_down") < self.traits.layers // 8 else base
        if category == "attn_output":
            small = {"IQ1_S": "IQ2_XXS", "IQ1_M": "IQ2_XXS", "IQ2_S": "IQ3_S", "IQ2_M": "IQ3_S"}
            return "Q5_K" if experts == 8 else small.get(self.mix.name, base)
        return base

    def _next(self, counter: str) -> int:
        self._seen[counter] = self._seen.get(counter, 0) + 1
        return self._seen[counter] - 1

    def _layer(self, category: str, tensor_name: str) -> int:
        """The layer number that the rules use for a feed-forward matrix."""
        counted = self._next(category)
        # The order of a layer's expert tensors does not allow counting layers.
        return file_order(tensor_name)[0] if self.traits.experts > 1 else counted

    def _value(self) -> str:
        layer, name = self._next("value"), self.mix.name
        grouped = self.traits.grouping >= 4
        small = "IQ3_XXS" if self.has_imatrix else "IQ3_S"
        kind = {
            "Q2_K": "Q4_K" if grouped else "Q3_K",
            "Q2_K_S": "Q4_K" if grouped else "Q2_K",
            "IQ3_XXS": "Q4_K" if grouped else small,
            "IQ3_XS": "Q4_K" if grouped else "IQ3_S",
            "IQ3_S": "Q4_K" if grouped else "IQ3_S",
            "IQ3_M": "Q4_K",
            "Q3_K_M": "Q5_K" if layer < 2 else "Q4_K",
            "Q3_K_L": "Q5_K",
            "IQ4_NL": "Q5_K" if grouped else "IQ4_NL",
            "IQ4_XS": "Q5_K" if grouped else "IQ4_XS",
            "Q4_K_S": "Q5_K" if layer < 4 else "Q4_K",
            "Q4_K_M": "Q6_K" if _is_outer(layer, self.value_count) else "Q4_K",
            "Q5_K_M": "Q6_K" if _is_outer(layer, self.value_count) else "Q5_K",
        }.get(name, self.mix.base)
        if self.traits.is_70b and kind in ("Q3_K", "Q4_K"):
            kind = "Q5_K"
        return "Q8_0" if self.traits.experts == 8 else kind

    def _gate_or_up(self, layer: int) -> str:
        eighth = self.traits.layers // 8, 7 * self.traits.layers // 8
        return "IQ3_XXS" if self.mix.name == "IQ3_XS" and eighth[0] <= layer < eighth[1] else self.mix.base

    def _down(self, layer: int) -> str:
        name, count = self.mix.name, self.traits.layers
        first = layer < count // 8
        falcon = self.traits.architecture == "falcon"
        if name in ("Q4_0", "Q5_0"):
            # An imatrix that is large in few columns makes scales without a minimum poor in the first layers.
            return self.mix.base.replace("_0", "_1") if self.has_imatrix and first else self.mix.base
        if name in ("IQ4_NL", "IQ4_XS"):
            return "Q5_K" if first and not self.has_imatrix else self.mix.base
        if name == "IQ3_XXS" and not self.has_imatrix:
            return "Q4_K" if first else "Q3_K"
        if name == "IQ3_M":
            more = first or (self.traits.experts == 8 and _is_outer(layer, count))
            return "Q4_K" if more else self.mix.base
        if falcon and name in ("Q3_K_L", "Q4_K_S"):
            return "Q4_K"
        if name == "Q3_K_M":
            if layer < count // 16:
                return "Q5_K"
            return "Q4_K" if not falcon or _is_outer(layer, count) else "Q3_K"
        if name == "Q4_K_M" and falcon:
            outer = "Q5_K" if _is_outer(layer, count) else "Q4_K"
            return "Q6_K" if layer < count // 16 else outer
        return {
            "Q2_K": "Q3_K",
            "Q2_K_S": "Q4_K" if first else "Q2_K",
            "Q3_K_L": "Q5_K",
            "Q4_K_S": "Q5_K" if first else "Q4_K",
            "Q4_K_M": "Q6_K" if _is_outer(layer, count) else "Q4_K",
            "Q5_K_M": "Q6_K" if _is_outer(layer, count) else "Q5_K",
        }.get(name, self.mix.base)

    def _attention_output(self) -> str:
        name, base = self.mix.name, self.mix.base
        if self.traits.architecture == "falcon":
            return "Q4_K" if name == "Q3_K_L" else base
        if self.traits.experts == 8:
            bigger = ("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", "IQ4_NL", "IQ4_XS")
            return "Q5_K" if name in bigger or name.startswith("IQ3") else base
        kinds = {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K", "IQ3_XXS": "IQ3_S", "IQ3_M": "Q4_K"}
        return kinds.get(name, base)


def _is_outer(layer: int, count: int) -> bool:
    return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2
