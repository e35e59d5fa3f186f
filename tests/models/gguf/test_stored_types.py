"""Models all in one of the newer tensor types: the logits of llama.cpp from the same file, which rounds activations to
8 bits, and of NVFP4 with the scales that files have for whole tensors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine.kernels.block_formats import NVFP4_SCALED
from quengine.models.checkpoint import open_checkpoint
from quengine.models.gguf import GGUFError, StringArray, open_gguf
from quengine.models.synthetic.presets import PRESETS, synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_logits import llama_cpp_logits
from tests.transformers_models import nmse, our_logits, token_ids

TYPES = [
    "IQ1_S",
    "IQ1_M",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ2_S",
    "IQ3_XXS",
    "IQ3_S",
    "NVFP4",
    "TQ1_0",
    "TQ2_0",
    "Q1_0",
    "Q2_0",
]
VOCAB = 300
SMALL = replace(
    PRESETS["tiny"],
    vocab_size=VOCAB,
    embedding_length=256,
    feed_forward_length=512,
    head_count=4,
    head_count_kv=2,
    context_length=64,
)
ROUNDED = 2e-3
"""A bound on what llama.cpp's 8-bit activations change; other weights make it about 1."""


def write(path: Path, kind: str, experts: int = 0) -> Path:
    spec = replace(SMALL, quant=kind, experts=experts, experts_used=min(experts, 2))
    return write_synthetic(path, replace(spec, name=f"small {kind}"))


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_llama_cpps(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "m.gguf", kind)
    checkpoint = open_checkpoint(path)
    assert ["take 2.06 bits a weight on CUDA" in note for note in checkpoint.notes] == [True] * (
        kind == "TQ1_0"
    )
    ours, theirs = our_logits(checkpoint, VOCAB), llama_cpp_logits(path, VOCAB)
    assert theirs is not None
    assert nmse(torch.from_numpy(theirs).double(), ours) < ROUNDED
    if kind in ("IQ1_M", "IQ2_XS", "IQ3_XXS", "NVFP4"):
        assert_engine_gives(path, ours)


def assert_engine_gives(path: Path, logits: Tensor) -> None:
    """In chunks of 16 tokens, and token by token, on the CPU."""
    with LLM(path, device="cpu", threads=1, ctx_size=64, chunk_size=16) as llm:
        for decode in (False, True):
            ours = llm.logits(token_ids(VOCAB).tolist(), decode=decode)
            assert nmse(ours.double(), logits) < 5e-5


def with_scales(source: Path, path: Path, scales: dict[str, np.ndarray]) -> Path:
    """The same file, with a tensor `NAME.scale` for each of `scales`."""
    with open_gguf(source) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            builder.tensor(name, tensor.shape, tensor.type.number, tensor.data)
        for name, values in scales.items():
            builder.tensor(f"{name}.scale", values.shape, "F32", values.astype("<f4"))
        return builder.write(path)


@pytest.mark.parametrize("experts", [0, 4])
def test_nvfp4_is_multiplied_by_the_scale_of_its_tensor(tmp_path: Path, experts: int) -> None:
    plain, path = write(tmp_path / "plain.gguf", "NVFP4", experts), tmp_path / "scaled.gguf"
    scales = {
        "blk.0.attn_q": np.array([0.3]),
        "blk.1.attn_output": np.array([2.7]),
        "blk.1.attn_v": np.array([0.6]),
    }
    if experts:
        scales |= {
            f"blk.{i}.ffn_{kind}_exps": np.linspace(0.5, 2, 4) + i for i in (0, 1) for kind in ("up", "down")
        }
    else:
        scales["blk.0.ffn_down"] = np.array([0.55])
    with_scales(plain, path, scales)
    checkpoint = open_checkpoint(path)
    assert f"{len(scales)} tensors of NVFP4 are copied with their scales" in checkpoint.notes[0]
    kinds = {name: tensor.format.name for name, tensor in checkpoint.tensors.items()}
    assert {name.removesuffix(".weight") for name, kind in kinds.items() if kind == NVFP4_SCALED} == set(
        scales
    )
    ours, theirs = our_logits(checkpoint, VOCAB), llama_cpp_logits(path, VOCAB)
    assert theirs is not None
    assert nmse(torch.from_numpy(theirs).double(), ours) < ROUNDED
    assert nmse(our_logits(open_checkpoint(plain), VOCAB), ours) > 10 * ROUNDED
    assert_engine_gives(path, ours)


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            {"blk.0.attn_q": np.ones(2)},
            r"F32 \[2\] is no scale of blk.0.attn_q.weight, which needs F32 \[1\]",
        ),
        ({"blk.0.attn_norm": np.ones(1)}, "not implemented"),
    ],
)
def test_other_scales_are_refused(tmp_path: Path, scales: dict[str, np.ndarray], message: str) -> None:
    path = with_scales(write(tmp_path / "plain.gguf", "NVFP4"), tmp_path / "scaled.gguf", scales)
    with pytest.raises(GGUFError, match=message):
        open_checkpoint(path)


def test_presets_all_in_one_type() -> None:
    whole = synthetic_preset("mistral-7b-iq2_xs")
    assert whole is not None and (whole.quant, whole.block_count) == ("IQ2_XS", 32)
    part = synthetic_preset("mistral-7b-2l-nvfp4")
    assert part is not None and (part.quant, part.block_count) == ("NVFP4", 2)
    assert synthetic_preset("mistral-7b-IQ2_XS") is None and synthetic_preset("nothing-iq2_xs") is None
