"""Synthetic models: valid files of true shapes, in every type, the same for the same seed."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from quengine.errors import CannotRunError, EngineError
from quengine.kernels.block_formats import FORMATS, dequantize, unpack
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.models.architectures import ARCHITECTURES
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.gguf import open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.gguf.vocab_checks import BYTE, CONTROL, NORMAL, check_vocabulary
from quengine.models.synthetic import random_blocks, synthetic
from quengine.models.synthetic.random_blocks import random_rows
from quengine.models.synthetic.synthetic import PRESETS, SyntheticModel, tensor_type, write_synthetic
from quengine.models.synthetic.synthetic_vocabulary import bpe_metadata, mistral_v3_pieces, spm_metadata
from quengine.models.tensor_table import FLOAT_TYPES, QUANT_TYPES, check_tensors, required_tensors

SMALL = replace(
    PRESETS["tiny"],
    name="small",
    vocab_size=300,
    embedding_length=256,
    feed_forward_length=256,
    head_count=4,
    head_count_kv=2,
    context_length=64,
)


def weights(data, kind):
    if kind in ("Q1_0", "Q2_0"):  # the gguf package lacks them
        return dequantize(FORMATS[kind], torch.from_numpy(data)).numpy()
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]).astype(np.float32)


@pytest.mark.parametrize("kind", sorted(FLOAT_TYPES | QUANT_TYPES))
def test_random_rows_of_every_type_have_the_spread_asked_for(kind):
    data = random_rows(kind, 64, 4096, 1 / 64, np.random.default_rng(1))
    w = weights(data, kind)
    assert w.shape == (64, 4096) and np.isfinite(w).all()
    # MXFP4's scales are powers of two, and NVFP4's few for small weights: their spread is met within a factor only.
    assert w.std() * 64 == pytest.approx(1.0, rel=0.25 if kind in ("MXFP4", "NVFP4") else 0.05)
    # The codes of Q4_0 and its like are centred half a step off zero.
    assert abs(w.mean()) < 0.12 * w.std()
    # Every row and every run of 256 differs from the others.
    assert len(np.unique(data, axis=0)) == 64
    # A block of 256 of a codebook type has as few as 8 sub-scales, of any size.
    assert (
        w.reshape(64, 16, 256).std(-1).min()
        > (0.2 if kind.startswith(("IQ1", "IQ2", "IQ3")) else 0.5) * w.std()
    )


@pytest.mark.parametrize("kind", sorted(QUANT_TYPES))
def test_random_scales_differ_between_groups(kind):
    groups = unpack(
        FORMATS[kind], torch.from_numpy(random_rows(kind, 8, 1024, 0.1, np.random.default_rng(2)))
    )
    assert len(torch.unique(groups.d)) > 1
    if groups.sc is not None:
        assert len(torch.unique(groups.sc)) > 4
    if groups.mn is not None:
        # Swapping scales and minimums has to show.
        assert (groups.mn != groups.sc).float().mean() > 0.3


def test_rows_that_are_not_whole_blocks_are_refused():
    with pytest.raises(ValueError, match="multiple"):
        random_rows("Q4_K", 1, 100, 1.0, np.random.default_rng(0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_written_model_is_whole_and_as_described(tmp_path, caplog, architecture, tied):
    spec = replace(SMALL, architecture=architecture, tied_output=tied, head_dim=128, rope_dim=64)
    if ARCHITECTURES[architecture].has_lone_parts:
        spec = replace(spec, block_count=6)  # some of each kind
    path = write_synthetic(tmp_path / "m.gguf", spec)
    with open_gguf(path) as file:
        config = read_gguf_config(file)
        check_tensors(file, config)
        check_vocabulary(file)
        assert config == spec.config()
        for tensor in file.tensors.values():
            assert np.isfinite(weights(tensor.data, tensor.type_name)).all()
        norm = file.tensors[f"{config.output_norm}.weight"].data.view("<f4")
        assert norm.mean() == pytest.approx(1.0, abs=0.05) and norm.std() == pytest.approx(0.1, abs=0.03)
    assert not caplog.records
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_the_gguf_package_reads_a_written_model(tmp_path):
    path = write_synthetic(tmp_path / "m.gguf", SMALL)
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        assert [t.name for t in theirs.tensors] == list(ours.tensors)
        assert all(t.data.tobytes() == ours.tensors[t.name].data.tobytes() for t in theirs.tensors)


def test_the_seed_decides_every_byte(tmp_path):
    first, again, other = (
        write_synthetic(tmp_path / name, SMALL, seed).read_bytes()
        for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == again != other and len(first) == len(other)


def test_frequency_factors_and_a_window_are_written(tmp_path):
    factors = tuple(float(f) for f in np.linspace(1, 8, 32, dtype=np.float32))
    spec = replace(SMALL, rope_freq_factors=factors, sliding_window=16)
    with open_gguf(write_synthetic(tmp_path / "m.gguf", spec)) as file:
        config = read_gguf_config(file)
        check_tensors(file, config)
    assert config.rope_scaling.freq_factors == factors and config.sliding_window == 16


def test_the_mix_of_mistral_7b_is_that_of_llama_cpp():
    """Q6_K in layers 0-3, 28-31 and every third between, of attn_v and ffn_down; and for the output matrix."""
    spec = PRESETS["mistral-7b"]
    shapes = required_tensors(spec.config())
    types = {name: tensor_type(spec, name, shape) for name, shape in shapes.items()}
    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    for role in ("attn_v", "ffn_down"):
        assert [i for i in range(32) if types[f"blk.{i}.{role}.weight"] == "Q6_K"] == more
    for role in ("attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"):
        assert {types[f"blk.{i}.{role}.weight"] for i in range(32)} == {"Q4_K"}
    assert (types["output.weight"], types["token_embd.weight"], types["output_norm.weight"]) == (
        "Q6_K",
        "Q4_K",
        "F32",
    )
    assert shapes["blk.31.ffn_down.weight"] == (4096, 14336) and shapes["blk.0.attn_k.weight"] == (1024, 4096)
    total = sum(synthetic._nbytes(shapes[name], types[name]) for name in shapes)
    assert total == pytest.approx(4.37e9, rel=0.01)  # Mistral-7B-v0.3 Q4_K_M as published


def types_of(preset):
    spec = PRESETS[preset]
    return {name: tensor_type(spec, name, shape) for name, shape in required_tensors(spec.config()).items()}


def test_the_mix_of_a_mixture_of_experts_is_that_of_llama_cpp():
    """ffn_down of experts as of dense layers; with 8 experts more bits for attention; routers are not quantized."""
    qwen, mixtral = types_of("qwen3-30b-a3b"), types_of("mixtral-8x7b")
    layers = range(48)
    more = [i for i in layers if i < 6 or i >= 42 or (i - 6) % 3 == 2]
    assert [i for i in layers if qwen[f"blk.{i}.ffn_down_exps.weight"] == "Q6_K"] == more
    assert [i for i in layers if qwen[f"blk.{i}.attn_v.weight"] == "Q6_K"] == more
    for role in ("attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps"):
        assert {qwen[f"blk.{i}.{role}.weight"] for i in layers} == {"Q4_K"}
    for role, kind in (("attn_k", "Q8_0"), ("attn_v", "Q8_0"), ("attn_output", "Q5_K"), ("attn_q", "Q4_K")):
        assert {mixtral[f"blk.{i}.{role}.weight"] for i in range(32)} == {kind}
    for types in (qwen, mixtral):
        assert {kind for name, kind in types.items() if "ffn_gate_inp" in name} == {"F32"}


def test_experts_cut_from_a_pool_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(random_blocks, "_POOL_BYTES", 100 * 144)
    spec = replace(SMALL, experts=8, experts_used=2)  # 256 rows of a block: more than the pool has
    paths = [write_synthetic(tmp_path / name, spec, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again != other
    with open_gguf(paths[0]) as file:
        check_tensors(file, read_gguf_config(file))
        tensor = file.tensors["blk.0.ffn_gate_exps.weight"]
        matrices = weights(tensor.data, tensor.type_name).reshape(8, -1)
    assert len(np.unique(matrices, axis=0)) == 8
    assert matrices.std() == pytest.approx(256**-0.5, rel=0.1)


def test_layers_cut_from_a_pool_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(random_blocks, "_POOL_BYTES", 100 * 144)
    path = write_synthetic(tmp_path / "a", replace(SMALL, block_count=2, pooled=True))
    with open_gguf(path) as file:
        check_tensors(file, read_gguf_config(file))
        first, second = (
            weights(file.tensors[f"blk.{layer}.attn_q.weight"].data, "Q4_K") for layer in range(2)
        )
    assert first.shape == second.shape and (first != second).any()
    assert first.std() == pytest.approx(256**-0.5, rel=0.1)


def test_the_two_layer_slice_differs_in_depth_only():
    assert (
        replace(PRESETS["mistral-7b"], name="synthetic mistral-7b-2l", block_count=2)
        == PRESETS["mistral-7b-2l"]
    )


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("mistral-8b", "there are mistral-7b, mistral-7b-2l, tiny"),
        (replace(SMALL, architecture="gemma"), "gemma"),
        (replace(SMALL, quant="Q9_K"), "Q9_K"),
        (replace(SMALL, quant="I8"), "I8"),
        (replace(SMALL, embedding_length=144), "multiple of 32"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, model, says):
    with pytest.raises(EngineError, match=says):
        write_synthetic(tmp_path / "m.gguf", model)
    assert not list(tmp_path.iterdir())


def test_too_little_disk_is_refused_before_writing(tmp_path, monkeypatch):
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    with pytest.raises(CannotRunError, match="GB are free"):
        write_synthetic(tmp_path / "m.gguf", SMALL)
    assert not list(tmp_path.iterdir())


def test_a_failure_while_writing_leaves_an_older_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"older")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(synthetic, "_weights", fail)
    with pytest.raises(OSError, match="disk full"):
        write_synthetic(path, SMALL)
    assert path.read_bytes() == b"older" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("size", [300, 1024, 5000])
def test_generated_vocabularies_have_the_size_asked_for_and_no_token_twice(size):
    for metadata in (spm_metadata(size), bpe_metadata(size, "qwen2")):
        tokens = metadata["tokenizer.ggml.tokens"]
        assert len(tokens) == len(set(tokens)) == size
        assert len(metadata["tokenizer.ggml.token_type"]) == size
    with pytest.raises(ValueError, match="at least 300"):
        spm_metadata(299)


def test_mistrals_own_vocabulary_is_used_at_its_size():
    pieces = mistral_v3_pieces()
    if pieces is None:
        pytest.skip("mistral-common is not installed")
    assert len(pieces.pieces) == 32768
    assert [pieces.types[i] for i in (1, 2, 3, 771, 1031)] == [CONTROL, CONTROL, CONTROL, BYTE, NORMAL]
    assert spm_metadata(32768)["tokenizer.ggml.tokens"] == pieces.pieces


def test_a_default_model_is_mistral_7b():
    assert SyntheticModel("synthetic mistral-7b") == PRESETS["mistral-7b"]


TINY = [
    name for name in PRESETS if name.endswith("tiny") and name != "granite-4.0-h-tiny"
]  # a released model of 7B


@pytest.mark.parametrize("preset", TINY)
def test_tiny_presets_are_as_described(tmp_path, preset):
    with open_gguf(write_synthetic(tmp_path / "m.gguf", preset)) as file:
        config = read_gguf_config(file)
        check_tensors(file, config)
    assert config == PRESETS[preset].config()


class Fetched(Mapping[str, QuantTensor]):
    """Tensors, and how often each was taken."""

    def __init__(self, source: Mapping[str, QuantTensor]) -> None:
        self.source, self.taken = source, Counter[str]()

    def __getitem__(self, name: str) -> QuantTensor:
        self.taken[name] += 1
        return self.source[name]

    def __contains__(self, name: object) -> bool:
        return name in self.source

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


@pytest.mark.parametrize(
    "preset", ["gemma-4-moe-tiny", "gemma-3n-tiny", "phi3-tiny", "deepseek2-tiny", "qwen3.5moe-tiny"]
)
def test_no_tensor_is_taken_twice(tmp_path: Path, preset: str) -> None:
    """Loading onto a device moves each tensor once; what is taken again comes from the host."""
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", preset))
    tensors = Fetched(checkpoint.tensors)
    Decoder(checkpoint.config, tensors, ReferenceBackend(keep=False), 64, 64)
    assert max(tensors.taken.values()) == 1
