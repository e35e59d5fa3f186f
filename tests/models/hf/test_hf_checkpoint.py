"""HFCheckpoint: GGUF names and order, views without a copy, and one line for each thing that can be wrong."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.errors import EngineError
from quengine.models.hf.hf_checkpoint import HFCheckpoint, permute_heads
from tests.gguf_builder import ModelSizes
from tests.hf_writer import fused, hf_config, hf_name, in_gguf_order, random_weights, write_hf

VOCAB = 48
BYTES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def checkpoint_of(
    folder: Path, sizes: ModelSizes | None = None, shards: int = 1, tied: bool = False, **changes: Any
) -> Path:
    sizes = sizes or ModelSizes()
    weights = random_weights(sizes, VOCAB, tied)
    return write_hf(folder, hf_config(sizes, VOCAB, tied, **changes), weights, shards)


def values(checkpoint: HFCheckpoint, name: str, dtype: torch.dtype) -> Tensor:
    tensor = checkpoint.tensors[name]
    return tensor.data.view(dtype).reshape(tensor.shape)


def error_of(folder: Path) -> str:
    with pytest.raises(EngineError) as caught:
        HFCheckpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == 1
    return message


@pytest.mark.parametrize("dtype", BYTES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_have_gguf_names_order_and_the_bytes_as_stored(
    tmp_path: Path, architecture: str, dtype: torch.dtype, shards: int
) -> None:
    sizes = ModelSizes(architecture=architecture)
    weights = random_weights(sizes, VOCAB, dtype=dtype)
    checkpoint = HFCheckpoint(write_hf(tmp_path, hf_config(sizes, VOCAB), weights, shards))
    expected = in_gguf_order(weights, sizes)
    assert set(checkpoint.tensors) == set(expected)
    for name, weight in expected.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.name, tensor.format.name, tensor.shape) == (name, BYTES[dtype], tuple(weight.shape))
        assert torch.equal(values(checkpoint, name, dtype), weight), name
    assert checkpoint.nbytes == sum(w.numel() * w.element_size() for w in weights.values())


def mapped(folder: Path) -> list[tuple[int, int]]:
    """Address ranges of this process that are the folder's files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if str(folder) in line]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def test_weights_are_views_on_the_mapped_file_but_for_permuted_ones(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(checkpoint_of(tmp_path))
    for name in checkpoint.tensors:
        address = checkpoint.tensors[name].data.data_ptr()
        in_file = any(low <= address < high for low, high in mapped(tmp_path))
        assert in_file == (name.split(".")[-2] not in ("attn_q", "attn_k")), name


def test_a_qwen_checkpoint_is_not_copied_at_all(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(checkpoint_of(tmp_path, ModelSizes(architecture="qwen3")))
    assert checkpoint.notes == []
    spans = mapped(tmp_path)
    for tensor in checkpoint.tensors.values():
        assert any(low <= tensor.data.data_ptr() < high for low, high in spans)


def test_the_copy_of_query_and_key_is_told_with_its_size(tmp_path: Path) -> None:
    (note,) = HFCheckpoint(checkpoint_of(tmp_path)).notes
    assert "query and key" in note and "0.00 GiB" in note


def test_permuting_touches_only_the_rotated_part_of_each_head() -> None:
    rows = torch.arange(16)[:, None].float()
    assert permute_heads(rows, 2, 8).flatten().tolist() == [
        0,
        4,
        1,
        5,
        2,
        6,
        3,
        7,
        8,
        12,
        9,
        13,
        10,
        14,
        11,
        15,
    ]
    assert permute_heads(rows, 2, 4).flatten().tolist() == [
        0,
        2,
        1,
        3,
        4,
        5,
        6,
        7,
        8,
        10,
        9,
        11,
        12,
        13,
        14,
        15,
    ]


def test_tied_embeddings_need_no_output_and_a_stored_one_that_differs_is_used(tmp_path: Path) -> None:
    tied = HFCheckpoint(checkpoint_of(tmp_path / "tied", tied=True))
    assert "output.weight" not in tied.tensors
    both = write_hf(
        tmp_path / "both",
        hf_config(ModelSizes(), VOCAB, tied=True),
        random_weights(ModelSizes(), VOCAB, tied=False),
    )
    assert "output.weight" in HFCheckpoint(both).tensors
    assert "lm_head.weight" in error_of(
        checkpoint_of(tmp_path / "none", tied=True, tie_word_embeddings=False)
    )


@pytest.mark.parametrize(
    ("body", "head"), [("language_model.model", "language_model."), ("model.language_model", "")]
)
def test_the_text_part_of_a_vision_model_is_found_and_the_rest_is_noted(
    tmp_path: Path, body: str, head: str
) -> None:
    sizes = ModelSizes()
    text = hf_config(sizes, VOCAB, model_type="mistral")
    config = {"model_type": "mistral3", "text_config": text, "vision_config": {}}
    weights = random_weights(sizes, VOCAB)
    extra = {"vision_tower.patch_conv.weight": torch.zeros(2, 2)}

    def rename(name: str) -> str:
        plain = hf_name(name) if name not in extra else name
        return (
            plain.replace("model.", f"{body}.", 1)
            if plain.startswith("model.")
            else plain.replace("lm_head", f"{head}lm_head")
        )

    checkpoint = HFCheckpoint(write_hf(tmp_path, config, weights | extra, rename=rename))
    expected = in_gguf_order(weights, sizes)
    assert all(torch.equal(values(checkpoint, name, torch.float32), expected[name]) for name in expected)
    assert any("vision_tower.patch_conv.weight" in note for note in checkpoint.notes)


def test_tensors_can_be_asked_for_without_being_made(tmp_path: Path) -> None:
    tensors = HFCheckpoint(checkpoint_of(tmp_path)).tensors
    assert "blk.0.attn_q.weight" in tensors and "blk.9.attn_q.weight" not in tensors
    assert len(tensors) == len(list(tensors))
    with pytest.raises(KeyError):
        tensors["blk.9.attn_q.weight"]


def test_tensors_outlive_close(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(checkpoint_of(tmp_path))
    held = checkpoint.tensors["blk.0.ffn_up.weight"]
    before = held.data.clone()
    checkpoint.close()
    assert torch.equal(held.data, before)


def edit_index(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "1 of 3 shards are missing: model-00002-of-00003.safetensors" in error_of(folder)


def test_a_shard_that_lacks_what_the_index_promises_is_named(tmp_path: Path) -> None:
    folder = checkpoint_of(tmp_path, shards=2)
    edit_index(
        folder, lambda index: index["weight_map"].update({"model.extra": "model-00002-of-00002.safetensors"})
    )
    message = error_of(folder)
    assert "model-00002-of-00002.safetensors" in message and "'model.extra' is missing" in message


@pytest.mark.parametrize(
    "file", ["../elsewhere.safetensors", "/etc/passwd", 7, "sub/model.safetensors", "x" * 5000]
)
def test_an_index_cannot_point_outside_the_folder(tmp_path: Path, file: Any) -> None:
    folder = checkpoint_of(tmp_path, shards=2)
    edit_index(folder, lambda index: index["weight_map"].update({"model.norm.weight": file}))
    assert "not a file of this folder" in error_of(folder)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "\x00"])
def test_a_broken_index_is_an_error(tmp_path: Path, index: str) -> None:
    folder = checkpoint_of(tmp_path, shards=2)
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json" in error_of(folder)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    sizes = ModelSizes(architecture="qwen2")
    weights = random_weights(sizes, VOCAB)
    del weights["blk.1.attn_k.bias"]
    folder = write_hf(tmp_path, hf_config(sizes, VOCAB), weights)
    assert "tensor 'model.layers.1.self_attn.k_proj.bias' is missing" in error_of(folder)


def test_a_wrong_shape_gives_both_shapes(tmp_path: Path) -> None:
    message = error_of(checkpoint_of(tmp_path, intermediate_size=100))
    assert "mlp.gate_proj.weight' has shape [96, 64], config.json needs [100, 64]" in message


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float64, "F64"), (torch.int8, "I8")]
)
def test_an_unsupported_type_is_named(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    weights = random_weights(ModelSizes(), VOCAB)
    weights["blk.0.ffn_up.weight"] = weights["blk.0.ffn_up.weight"].to(dtype)
    message = error_of(write_hf(tmp_path, hf_config(ModelSizes(), VOCAB), weights))
    assert f"mlp.up_proj.weight' is of type {name}; supported are F32, F16, BF16" in message


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_a_quantized_checkpoint_is_refused_by_the_methods_name(tmp_path: Path, method: str) -> None:
    message = error_of(checkpoint_of(tmp_path, quantization_config={"quant_method": method, "bits": 4}))
    assert method in message and "quantization_config" in message


def test_an_unsupported_model_type_is_named(tmp_path: Path) -> None:
    message = error_of(checkpoint_of(tmp_path, model_type="falcon_h1"))
    assert "falcon_h1" in message and "qwen3" in message


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.o_proj.bias", "model.layers.2.mlp.up_proj.weight", "lm_head.bias"]
)
def test_a_tensor_that_would_change_the_result_is_not_passed_over(tmp_path: Path, name: str) -> None:
    weights = random_weights(ModelSizes(), VOCAB) | {name: torch.zeros(64)}
    folder = write_hf(
        tmp_path, hf_config(ModelSizes(), VOCAB), weights, rename=lambda n: n if n == name else hf_name(n)
    )
    assert f"1 tensors that this decoder does not apply: {name}" in error_of(folder)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    weights = random_weights(ModelSizes(), VOCAB) | {name: torch.zeros(8)}
    folder = write_hf(
        tmp_path, hf_config(ModelSizes(), VOCAB), weights, rename=lambda n: n if n == name else hf_name(n)
    )
    assert not any(name in note for note in HFCheckpoint(folder).notes)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    assert "config.json" in error_of(tmp_path)
    folder = checkpoint_of(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "neither model.safetensors nor model.safetensors.index.json" in error_of(folder)


@pytest.mark.parametrize("damage", ["empty", "cut header", "cut data", "huge header", "not json"])
def test_a_damaged_file_is_an_error_with_its_name(tmp_path: Path, damage: str) -> None:
    folder = checkpoint_of(tmp_path)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "cut header": good[:40],
            "cut data": good[:-1],
            "huge header": struct.pack("<Q", 1 << 60) + good[8:],
            "not json": good[:8] + b"?" + good[9:],
        }[damage]
    )
    assert "model.safetensors" in error_of(folder)


EXPERTS = ModelSizes("qwen2moe", blocks=1, experts=3, separate=True)


def experts_folder(folder: Path, in_one_tensor: bool, change: Any = None) -> dict[str, Tensor]:
    """Writes a model with experts; returns its weights by GGUF name. `change` alters them by their names there."""
    weights = random_weights(EXPERTS, VOCAB)
    named = {hf_name(name): weight for name, weight in weights.items()}
    named = fused(named) if in_one_tensor else named
    if change is not None:
        change(named)
    write_hf(folder, hf_config(EXPERTS, VOCAB), named, rename=lambda name: name)
    return weights


@pytest.mark.parametrize("in_one_tensor", [False, True])
def test_experts_are_views_on_the_file_in_either_form(tmp_path: Path, in_one_tensor: bool) -> None:
    weights = experts_folder(tmp_path, in_one_tensor)
    checkpoint = HFCheckpoint(tmp_path)
    assert set(checkpoint.tensors) == set(weights)
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(values(checkpoint, name, torch.float32).view(weights[name].shape), weights[name])
        assert any(low <= tensor.data.data_ptr() < high for low, high in mapped(tmp_path)), name
    assert checkpoint.nbytes == sum(w.numel() * w.element_size() for w in weights.values())
    assert checkpoint.notes == []


LAYER = "model.layers.0.mlp"


@pytest.mark.parametrize(
    ("in_one_tensor", "change", "problem"),
    [
        (False, lambda t: t.pop(f"{LAYER}.experts.2.up_proj.weight"), "experts.2.up_proj.weight' is missing"),
        (False, lambda t: t.update({f"{LAYER}.experts.3.up_proj.weight": torch.zeros(1)}), "does not apply"),
        (True, lambda t: t.pop(f"{LAYER}.experts.down_proj"), "experts.0.down_proj.weight' is missing"),
        (True, lambda t: t.update({f"{LAYER}.experts.down_proj": torch.zeros(3, 32, 64)}), "has shape"),
        (True, lambda t: t.update({f"{LAYER}.experts.gate_up_proj": torch.zeros(3, 32, 64)}), "has shape"),
        (True, lambda t: t.update({f"{LAYER}.gate.weight": torch.zeros(4, 64)}), "has shape"),
        (True, lambda t: t.update({f"{LAYER}.shared_expert_gate.weight": torch.zeros(64)}), "has shape"),
        (True, lambda t: t.update({f"{LAYER}.gate.bias": torch.zeros(3)}), "does not apply: .*gate.bias"),
    ],
)
def test_experts_that_are_not_as_the_config_says_are_refused(
    tmp_path: Path, in_one_tensor: bool, change: Any, problem: str
) -> None:
    experts_folder(tmp_path, in_one_tensor, change)
    assert re.search(problem, error_of(tmp_path))


def test_experts_of_different_types_are_refused(tmp_path: Path) -> None:
    name = f"{LAYER}.experts.1.up_proj.weight"
    experts_folder(tmp_path, False, lambda tensors: tensors.update({name: tensors[name].half()}))
    assert "differ in type: F16, F32" in error_of(tmp_path)
