"""Qwen3-Next and Qwen3.5 as folders and as GGUF: the logits of `transformers`, states, and refusals by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.models.architectures import layers_of
from quengine.models.blocks.gated_delta import GatedDelta
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.gguf import StringArray, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import DELTA, GGUFBuilder, ModelSizes, bpe_vocabulary, model_builder
from tests.llama_cpp_logits import LlamaCpp
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened, path_of
from tests.models.architectures.long_batches import SameLongLogits, paged_cache
from tests.transformers_models import DROP, edit, nmse, our_logits, transformers_model

LAYERS = ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"]
SIZES = {
    "num_hidden_layers": 5,
    "max_position_embeddings": 1024,
    "layer_types": LAYERS,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 32,
}
MOE = {
    **SIZES,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}


def remember(model: Any) -> None:
    """Decays near 1, so that positions far back count; and inputs of SiLU so large that queries and keys are hardly
    negative: of a query across all keys only rounding is left, which the norm of the result then makes large."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-5.0, 0.0)
        if name.endswith("conv1d.weight"):
            weight.normal_(0.0, 2.0)


def as_released(folder: Path) -> None:
    """With the first keys: an interval in place of the layers' kinds, rotary sizes at the top level."""
    edit(folder, layer_types=DROP, full_attention_interval=2, rope_parameters=DROP)
    edit(folder, rope_theta=10000.0, partial_rotary_factor=0.5)


def with_draft_layer(folder: Path) -> None:
    """With a layer as its last one with attention that drafts tokens, as released folders have."""
    path = folder / "model.safetensors"
    tensors, random = load_file(path), torch.Generator().manual_seed(5)
    layer = "model.layers.4."
    found = {
        name.replace(layer, "mtp.layers.0."): torch.randn(tensor.shape, generator=random)
        for name, tensor in tensors.items()
        if name.startswith(layer)
    }
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    found |= {f"mtp.{name}.weight": torch.randn(64, generator=random) for name in norms}
    found["mtp.fc.weight"] = torch.randn(64, 128, generator=random)
    save_file({**tensors, **found}, path, metadata={"format": "pt"})
    edit(folder, mtp_num_hidden_layers=1)


def case(model_type: str, config: dict[str, Any], **options: Any) -> Case:
    return Case(model_type, config, change=remember, **{"drafts": False, **options})


CASES = {
    "plain": case("qwen3_5_text", SIZES),
    "three value heads for each key head": case(
        "qwen3_5_text", {**SIZES, "linear_num_value_heads": 6, "tie_word_embeddings": True}
    ),
    "as many key heads, three taps": case(
        "qwen3_5_text", {**SIZES, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}
    ),
    "interval": case(
        "qwen3_5_text",
        {**SIZES, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
        edit=as_released,
        converts=False,
    ),
    "draft layer": case("qwen3_5_text", SIZES, edit=with_draft_layer, drafts=True),
    "vision": case("qwen3_5_text", SIZES, vision=True),
    "experts": case("qwen3_5_moe_text", MOE, mixture=True),
    "experts and vision": case("qwen3_5_moe_text", MOE, vision=True),
    "next": case("qwen3_next", {**MOE, "linear_num_value_heads": 6}),
    "next, not normalized": case("qwen3_next", {**MOE, "norm_topk_prob": False}, converts=False),
    "next, dense layers": case(
        "qwen3_next", {**MOE, "mlp_only_layers": [0], "decoder_sparse_step": 2}, converts=False
    ),
}


class TestLogits(SameLogits):
    main = ("plain", "experts", "next")


def test_layers_are_declared_one_by_one(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (1, 4)), CacheGroup(None, (0, 2, 3), is_state=True))
        mixers = [block.mixer for block in layers_of(config)]
        assert [isinstance(mixer, GatedDelta) for mixer in mixers] == [
            kind == "linear_attention" for kind in LAYERS
        ]
        assert mixers[0].state.shapes == ((4, 256), (4, 32, 32))
        assert config.gated_delta is not None and config.gated_delta.tiled == (kind == "gguf")


def test_layers_that_draft_are_passed_over_with_a_note(root: Path) -> None:
    for kind in KINDS:
        checkpoint = opened(root, "draft layer", kind)
        assert checkpoint.config.block_count == 5
        used = "the model has a layer that drafts tokens (MTP), which --draft-mtp uses: 15 tensors"
        assert used in checkpoint.notes


class TestLongTexts(SameLongLogits):
    """`transformers` computes 64 positions at once."""

    lengths = (1, 70, 199)
    chunks = ((1, 0, 3), (0, 64, 61), (0, 0, 64), (0, 6, 1), (0, 0, 70))


@pytest.mark.parametrize("name", ["plain", "next"])
def test_a_prompt_of_1000_tokens_has_the_logits_of_transformers(root: Path, name: str) -> None:
    """Sixteen chunks of 64 positions: by the definition in one step, and behind its states token by token."""
    checkpoint, vocab = opened(root, name, "gguf"), CASES[name].vocab
    ids = torch.randint(0, vocab, (1000,), generator=torch.Generator().manual_seed(9))
    model, _ = transformers_model(root / name)
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    decoder = Decoder(checkpoint.config, checkpoint.tensors, ReferenceBackend(keep=True), 1024, 1024)
    cache, device, table = paged_cache(checkpoint.config, 32), torch.device("cpu"), [list(range(32, 64)), [1]]
    ours = [
        decoder.forward(prefill_batch([ids[:996].tolist()], [0], [table], device, all_logits=True), cache)
    ]
    for position in range(996, 1000):
        ours.append(decoder.forward(decode_batch([int(ids[position])], [position], [table], device), cache))
    assert nmse(torch.cat([rows.clone() for rows in ours]), theirs) < 1e-9


PROMPTS = (1, 5, 63, 64, 65, 130)
"""Lengths of prompts; llama.cpp, too, computes chunks of 64 positions."""

GENERATED = 24


@pytest.mark.parametrize(
    "name", ["plain", "three value heads for each key head", "draft layer", "experts", "next"]
)
def test_greedy_texts_are_llama_cpps(root: Path, name: str) -> None:
    """All tokens: of files in fp32 llama.cpp rounds no activations."""
    path, vocab, random = path_of(root, name, "gguf"), CASES[name].vocab, torch.Generator().manual_seed(21)
    params = SamplingParams(temperature=0.0, max_tokens=GENERATED, ignore_eos=True)
    with LLM(path, "cpu", ctx_size=256) as llm, LlamaCpp(path, vocab) as peer:
        ends = list(llm.tokenizer.eos_ids)
        for length in PROMPTS:
            prompt = torch.randint(0, vocab, (length,), generator=random).tolist()
            ours, theirs = llm.generate(prompt, params)[0].tokens, list[int]()
            peer.clear()
            logits = peer.step(prompt)[-1]
            while len(theirs) < GENERATED:
                logits[ends] = -np.inf
                theirs.append(int(logits.argmax()))
                logits = peer.step(theirs[-1:])[-1]
            assert ours == theirs, f"behind {length} tokens"


def write_first_form(source: Path, path: Path, config: ModelConfig) -> None:
    """A file of Qwen3-Next as llama.cpp's first converters wrote it: the rows of qkv and z by key head, in `ssm_in`."""
    sizes = config.gated_delta
    assert sizes is not None
    with open_gguf(source) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            if name.endswith("attn_gate.weight"):
                continue
            if not name.endswith("attn_qkv.weight") or f"{name[:-15]}attn_gate.weight" not in file.tensors:
                builder.tensor(name, tensor.shape, tensor.type_name, tensor.data)
                continue
            parts = torch.from_numpy(tensor.data.copy()).split([sizes.keys, sizes.keys, sizes.values])
            z = torch.from_numpy(file.tensors[f"{name[:-15]}attn_gate.weight"].data.copy())
            heads = [part.view(sizes.key_heads, -1, part.shape[1]) for part in (*parts, z)]
            data = torch.cat(heads, dim=1).flatten(0, 1)
            shape = (len(data), tensor.shape[1])
            builder.tensor(f"{name[:-15]}ssm_in.weight", shape, tensor.type_name, data.numpy())
        builder.write(path)


def test_the_first_files_of_qwen3_next_have_the_same_logits(root: Path, tmp_path: Path) -> None:
    vocab, now = CASES["next"].vocab, opened(root, "next", "gguf")
    write_first_form(path_of(root, "next", "gguf"), tmp_path / "first.gguf", now.config)
    first = open_checkpoint(tmp_path / "first.gguf")
    assert "blk.0.ssm_in.weight" in first.tensors and "blk.0.attn_qkv.weight" not in first.tensors
    assert torch.equal(our_logits(first, vocab), our_logits(now, vocab))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": LAYERS[:4]}, "layer_types: is not a list of the kinds of 5 layers"),
        ({"layer_types": [*LAYERS[:4], "mamba"]}, "layer_types: mamba: not implemented"),
        ({"layer_types": LAYERS[:1] * 5}, "layer_types: no layer has attention: not implemented"),
        (
            {"layer_types": DROP, "full_attention_interval": 6},
            "full_attention_interval: no layer has attention",
        ),
        ({"linear_value_head_dim": 16}, "linear_value_head_dim: 16 differs from linear_key_head_dim, 32"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads: 5 is not a multiple of the 2 key heads"),
        ({"linear_key_head_dim": 12, "linear_value_head_dim": 12}, "12 is not a multiple of 8"),
        ({"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim: 17 is not from 1 to 16"),
        ({"attn_output_gate": False}, "attn_output_gate: false is not implemented"),
        ({"attention_bias": True}, "attention_bias: biases on the output"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented, only silu is"),
    ],
)
def test_what_a_folder_has_that_is_not_computed_is_refused(
    root: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not DROP}
    with pytest.raises(EngineError, match=message):
        read_hf_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.inner_size": 24}, "ssm.inner_size.*24 is not 2 value heads of 8"),
        ({"ssm.time_step_rank": 0}, "ssm.time_step_rank.*0 is not from 1"),
        ({"ssm.state_size": None}, "ssm.state_size.*missing"),
        ({"ssm.conv_kernel": 17}, "ssm.conv_kernel.*17 is not from 1 to 16"),
        ({"ssm.group_count": 4}, "ssm.time_step_rank.*2 is not a multiple of the 4 key heads"),
        ({"full_attention_interval": 3}, "full_attention_interval.*no layer has attention"),
        ({"attention.recurrent_layers": [True]}, "recurrent_layers.*does not mark some of the first 2 of 2"),
        ({"attention.recurrent_layers": [True, True]}, "recurrent_layers.*no layer has attention"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers.*2 is not from 0 to 1"),
        ({"attention.sliding_window": 8}, "attention.sliding_window.*windows are not implemented"),
        ({"rope.dimension_sections": [4, 2, 1, 1]}, "is not implemented, only three sections"),
        ({"rope.dimension_sections": [0, 0, 0, 0]}, "are not the 8 frequencies of a head"),
    ],
)
def test_what_a_file_has_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    sizes = ModelSizes("qwen35", **DELTA)
    changed = {f"qwen35.{key}": value for key, value in changes.items()}
    path = model_builder(sizes, bpe_vocabulary(), changes=changed).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(EngineError, match=message):
        read_gguf_config(file)


@pytest.mark.parametrize(
    ("key_heads", "head_dim", "message"),
    [
        (3, 32, "3 key heads of gated delta nets, which 2 ranks cannot share equally"),
        (2, 16, r"blk.0.ssm_out.weight \(F32\) has parts of 16 columns a rank, not a multiple of 32"),
    ],
)
def test_heads_that_ranks_cannot_share_are_named(
    tmp_path: Path, key_heads: int, head_dim: int, message: str
) -> None:
    sizes = ModelSizes("qwen35", key_heads=key_heads, value_heads=2 * key_heads, delta_head_dim=head_dim)
    path = model_builder(sizes, bpe_vocabulary()).write(tmp_path / "m.gguf")
    with pytest.raises(EngineError, match=message):
        LLM(path, "cpu", ctx_size=64, tensor_parallel=2)
