"""Which tensor gets which type, against what llama-quantize chose for the same tensors.

`llama_quantize_types.json` has, for each model of `MODELS`, mix and options, the SHA-256 of the lines "NAME TYPE" that
`llama-quantize --dry-run` (llama-cpp-python 0.3.36) printed, in its order.
"""

import hashlib
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from quengine.errors import EngineError
from quengine.models.gguf.header import GGUFTensor
from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from quengine.models.quantize.mixes import (
    MIXES,
    ModelTraits,
    Overrides,
    choose_types,
    file_order,
    fitting,
    mix_of,
    type_named,
)
from tests.each_case import each_case

STOPS = "--token-embedding-type q5_k --output-tensor-type q8_0"
"""With these options llama-quantize stops at rows that hold no whole blocks ("odd"); we take a type that they fit."""
RECORDED = {
    key: value
    for key, value in json.loads((Path(__file__).parent / "llama_quantize_types.json").read_text()).items()
    if not (key.startswith("odd ") and key.endswith(STOPS))
}

GROUPED = ModelTraits("llama", layers=17, experts=0, heads=4, kv_heads=1)
MODELS = {
    "gqa": GROUPED,
    "mha": replace(GROUPED, kv_heads=4),
    "odd": GROUPED,
    "moe8": replace(GROUPED, layers=9, experts=8),
    "moe4": replace(GROUPED, architecture="qwen3moe", experts=4),
    "l80": replace(GROUPED, layers=80),
}
"""`mha` has no output matrix, and rows of `odd` are no multiple of 256."""

OPTIONS = {
    "--pure": Overrides(pure=True),
    STOPS: Overrides("Q8_0", "Q5_K"),
    "--tensor-type ffn_down=q6_k --tensor-type blk.1.*attn=iq4_nl": Overrides(
        patterns=[(re.compile("ffn_down"), "Q6_K"), (re.compile("blk.1.*attn"), "IQ4_NL")]
    ),
}


def tensor(name: str, *shape: int) -> GGUFTensor:
    kind = TYPE_BY_NAME["F32" if len(shape) == 1 or "gate_inp" in name else "F16"]
    return GGUFTensor(Path("x"), name, kind, shape, 0, 0, 0, np.zeros(0, np.uint8))


@cache
def tensors(model: str) -> list[GGUFTensor]:
    traits = MODELS[model]
    width, inner = (96, 352) if model == "odd" else (256, 256)
    head = width // 4
    found = [tensor("token_embd.weight", 512, width), tensor("output_norm.weight", width)]
    found += [] if model == "mha" else [tensor("output.weight", 512, width)]
    for layer in range(traits.layers):
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,),
            "attn_q": (width, width),
            "attn_k": (head * traits.kv_heads, width),
            "attn_v": (head * traits.kv_heads, width),
            "attn_output": (width, width),
            "ffn_norm": (width,),
        }
        if traits.architecture == "qwen3moe":
            shapes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
        if experts := traits.experts:
            shapes["ffn_gate_inp"] = (experts, width)
            shapes |= {f"ffn_{part}_exps": (experts, inner, width) for part in ("gate", "up")}
            shapes["ffn_down_exps"] = (experts, width, inner)
        else:
            shapes |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
        found += [tensor(f"blk.{layer}.{name}.weight", *shape) for name, shape in shapes.items()]
    return sorted(found, key=lambda each: file_order(each.name))


def chosen(model: str, mix: str, imatrix: bool = False, overrides: Overrides | None = None) -> dict[str, str]:
    given = overrides or Overrides()
    types = choose_types(tensors(model), mix_of(mix), MODELS[model], given, imatrix)
    return {each.name: fitting(each, types[each.name]) for each in tensors(model)}


@each_case("key", RECORDED)
def test_types_are_those_of_llama_quantize(key: str) -> None:
    model, mix, *rest = key.split(" ", 2)
    options = rest[0] if rest else ""
    types = chosen(model, mix, options == "imatrix", OPTIONS.get(options))
    lines = "".join(f"{name} {kind}\n" for name, kind in types.items())
    assert hashlib.sha256(lines.encode()).hexdigest()[:16] == RECORDED[key]


def test_every_mix_is_among_them() -> None:
    assert {key.split(" ")[1] for key in RECORDED} == set(MIXES) and len(RECORDED) > 300


def test_a_mix_as_a_person_reads_it() -> None:
    types = chosen("gqa", "Q4_K_M")
    down = [types[f"blk.{layer}.ffn_down.weight"] for layer in range(17)]
    assert [layer for layer, kind in enumerate(down) if kind == "Q6_K"] == [0, 1, 4, 7, 10, 13, 14, 15, 16]
    assert types["output.weight"] == "Q6_K" and types["token_embd.weight"] == "Q4_K"
    assert types["output_norm.weight"] == types["blk.0.attn_norm.weight"] == "F32"


@pytest.mark.parametrize(("name", "mix"), [("q4_k", "Q4_K_M"), ("MXFP4", "MXFP4_MOE"), ("iq4_xs", "IQ4_XS")])
def test_names_are_llama_quantizes_in_any_case(name: str, mix: str) -> None:
    assert mix_of(name).name == mix


def test_other_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(EngineError, match=r"no type Q4_K_X: .*did you mean Q4_K_"):
        mix_of("Q4_K_X")
    with pytest.raises(EngineError, match="no tensor type q9_0"):
        type_named("q9_0")


def test_a_pattern_that_no_name_has_is_an_error() -> None:
    with pytest.raises(EngineError, match="--tensor-type fnn_down=Q6_K: no tensor's name has that in it"):
        chosen("gqa", "Q4_K_M", overrides=Overrides(patterns=[(re.compile("fnn_down"), "Q6_K")]))


@pytest.mark.parametrize("name", ["output.weight", "token_embd.weight"])
def test_a_type_that_rows_do_not_fit_is_replaced(name: str) -> None:
    """llama-quantize stops at it."""
    overrides = Overrides(output="Q8_0", token_embedding="Q8_0")
    narrow = tensor(name, 512, 40)
    (kind,) = choose_types([narrow], mix_of("Q4_K_M"), MODELS["gqa"], overrides, False).values()
    assert kind == "Q8_0" and fitting(narrow, kind) == "F16"
