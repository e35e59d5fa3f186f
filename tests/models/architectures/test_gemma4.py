"""Gemma 4 as a folder and as GGUF: the logits of `transformers`, heads of two sizes, experts beside a feed-forward."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine.errors import EngineError
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import ForwardBatch, prefill_batch
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import open_checkpoint
from quengine.models.config import CacheGroup, LayerSizes, ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.gguf import GGUFError, StringArray, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import GGUFBuilder, ModelSizes, model_builder
from tests.llama_cpp_convert import VOCAB
from tests.llama_cpp_logits import llama_cpp_logits
from tests.models.architectures.both_files import Case, SameLogits, opened
from tests.transformers_models import nmse, our_logits

SIZES = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 5,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 64,
    "final_logit_softcapping": 3.0,
}
SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
}


def scales(model: Any) -> None:
    """Other numbers than the ones that models are made with."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("layer_scalar"):
            tensor.uniform_(0.5, 1.5)
        if name.endswith(("router.scale", "per_expert_scale")):
            tensor.add_(torch.randn_like(tensor) * 0.3)
        if name.endswith(
            "q_norm.weight"
        ):  # scores of one size, as in trained models: nothing else scales them
            tensor.mul_(len(tensor) ** -0.5)


LAYERED = {
    **SIZES,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_key_value_heads": 1,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
}
"""As E2B: layers that share keys and values, of which the last is global; a part of each token for each layer."""

CASES = {
    "layered": Case("gemma4_text", LAYERED, change=scales),
    "layered, no sharing": Case("gemma4_text", {**LAYERED, **SAME, "num_kv_shared_layers": 0}, change=scales),
    "plain": Case("gemma4_text", {**SIZES, **SAME}, change=scales),
    "experts": Case("gemma4_text", {**SIZES, **SAME, **EXPERTS}, change=scales),
    "own values, uncapped": Case("gemma4_text", {**SIZES, "final_logit_softcapping": None}, change=scales),
}


class TestLogits(SameLogits):
    main = ("plain", "experts", "layered")


def test_keys_of_layers_that_share_those_of_others_are_passed_over(root: Path, tmp_path: Path) -> None:
    """Released files have them, and `transformers` and llama.cpp read none of them."""
    ours = our_logits(opened(root, "layered", "gguf"), VOCAB)
    builder = GGUFBuilder()
    with open_gguf(root / "layered.gguf") as file:
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            builder.tensor(name, tensor.shape, tensor.type_name, tensor.data)
        for name in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensor = file.tensors[f"blk.2.{name}"]
            builder.tensor(f"blk.5.{name}", tensor.shape, tensor.type_name, tensor.data)
    with_keys = open_checkpoint(builder.write(tmp_path / "keys.gguf"))
    assert torch.equal(our_logits(with_keys, VOCAB), ours)
    shutil.copytree(root / "layered", tmp_path / "folder")
    weights = load_file(tmp_path / "folder" / "model.safetensors")
    weights["model.layers.5.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(weights, tmp_path / "folder" / "model.safetensors", {"format": "pt"})
    folder = open_checkpoint(tmp_path / "folder")
    assert nmse(our_logits(folder, VOCAB), ours) < 1e-9


def test_layers_are_in_two_cache_groups(root: Path) -> None:
    for kind in ("gguf", "folder"):
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (2, 3)), CacheGroup(5, (0, 1)))
        assert [config.head_size(i) for i in range(4)] == [16, 16, 32, 32]
        assert config.keys_as_values == (2, 3)


TEXT = {
    "model_type": "gemma4_text",
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 1024,
    "final_logit_softcapping": 30.0,
}
"""What the text_config of gemma-4-26B-A4B-it has beside the class's."""


def config_of(**changes: Any) -> ModelConfig:
    return read_hf_config({"model_type": "gemma4", "text_config": TEXT | changes})


def test_a_released_folder_leaves_much_to_defaults() -> None:
    config = config_of()
    assert config.full_attention_layers == config.keys_as_values == (5, 11, 17, 23, 29)
    assert config.sizes(0) == LayerSizes(16, 8, 2112, 256) and config.sizes(5) == LayerSizes(16, 2, 2112, 512)
    assert (config.attention_scale, config.logit_softcap, config.tied_output) == (1.0, 30.0, True)
    full, local = config.rotation(5).spec(), config.rotation(0).spec()
    assert (full.dim, full.base, local.dim, local.base) == (512, 1e6, 256, 1e4)
    assert full.freq_factors is not None and local.freq_factors is None
    assert full.freq_factors[:64] == (1.0,) * 64 and min(full.freq_factors[64:]) > 9e29
    assert config.experts is not None and config.experts.router.used == 8


def test_last_layers_use_keys_and_values_of_earlier_ones() -> None:
    config = config_of(num_kv_shared_layers=10, use_double_wide_mlp=True, hidden_size_per_layer_input=256)
    assert [config.kv_source(i) for i in (18, 19, 20, 23, 28, 29)] == [18, 19, 19, 17, 19, 17]
    assert config.cache_groups[0].layers == (5, 11, 17) and len(config.cache_groups[1].layers) == 17
    assert [config.sizes(i).feed_forward_length for i in (19, 20)] == [2112, 4224]
    assert config.layer_input is not None and config.layer_input.length == 256


def test_a_dense_model_has_no_experts() -> None:
    assert config_of(enable_moe_block=False).experts is None
    unified = {key: value for key, value in TEXT.items() if "expert" not in key and "moe" not in key}
    unified["model_type"] = "gemma4_unified_text"
    config = read_hf_config({"model_type": "gemma4_unified", "text_config": unified})
    assert config.experts is None and config.context_length == 262144


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 4096},
        {"hidden_size_per_layer_input": -1},
        {"num_kv_shared_layers": 30},
        {"num_kv_shared_layers": 26},
        {"num_kv_shared_layers": 2, "per_layer_config": {"29": {"num_key_value_heads": 4}}},
        {"num_kv_shared_layers": 2, "use_double_wide_mlp": 1},
        {"use_bidirectional_attention": "all"},
        {"hidden_activation": "gelu"},
        {"attention_bias": True},
        {"sliding_window": None},
        {"final_logit_softcapping": 0.0},
        {"attention_k_eq_v": 1},
        {"enable_moe_block": "yes"},
        {"per_layer_config": {"30": {"head_dim": 512}}},
        {"per_layer_config": {"5": {"head_dim": 128}}},
        {"per_layer_config": {"5": {"sliding_window": 4}}},
        {"per_layer_config": {"5": 512}},
        {"per_layer_config": [512]},
        {"global_head_dim": 1},
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "factor": 8.0}}},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}},
        {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}},
    ],
    ids=str,
)
def test_what_the_decoder_does_not_compute_is_refused_in_one_line(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"^config.json: ") as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.shared_kv_layers", 1),
        ("attention.shared_kv_layers", 4),
        ("embedding_length_per_layer_input", -1),
        ("embedding_length_per_layer_input", 1 << 22),
        ("attention.sliding_window", 0),
        ("attention.sliding_window_pattern", None),
        ("attention.sliding_window_pattern", 2),
        ("attention.sliding_window_pattern", [True]),
        ("attention.key_length_swa", None),
        ("rope.dimension_count_swa", 7),
        ("rope.dimension_count_swa", 32),
        ("rope.freq_base_swa", None),
        ("final_logit_softcapping", -1.0),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = model_builder(ModelSizes("gemma4"), tied=True, changes={f"gemma4.{key}": value})
    with open_gguf(path.write(tmp_path / "m.gguf")) as file, pytest.raises(GGUFError) as caught:
        read_gguf_config(file)
    assert caught.value.field == f"gemma4.{key}"


@pytest.mark.parametrize("name", ["experts", "layered"])
def test_llama_cpp_computes_the_same(root: Path, name: str) -> None:
    """But for llama.cpp's cache in fp16, which tips the choice of experts at some positions: the median position is
    compared."""
    ours = our_logits(opened(root, name, "gguf"), CASES[name].vocab)
    theirs = llama_cpp_logits(root / f"{name}.gguf", CASES[name].vocab)
    assert theirs is not None
    rows = zip(ours, torch.from_numpy(theirs).double(), strict=True)
    assert torch.tensor([nmse(*row) for row in rows]).median() < 1e-3


def test_layers_that_write_no_keys_compute_the_last_rows_of_prompts(root: Path) -> None:
    """Of two prompts in one step, to the bits of all rows but for the output matrix's kernel."""
    checkpoint = opened(root, "layered", "folder")
    decoder = Decoder(checkpoint.config, checkpoint.tensors, CpuBackend(1), 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    computed = []
    own = decoder.backend.input_glu

    def counted(batch: ForwardBatch, x: torch.Tensor, *arguments: Any) -> Any:
        computed.append(len(x))
        return own(batch, x, *arguments)

    for block in decoder.blk:
        block.input.backend = Counted(decoder.backend, counted)  # type: ignore[union-attr]
    ids, tables = [[3, 4, 5, 6, 7], [8, 9, 10]], [[[0], [0]], [[1], [1]]]
    every = decoder.forward(prefill_batch(ids, [0, 0], tables, torch.device("cpu"), True), cache)
    last = decoder.forward(prefill_batch(ids, [0, 0], tables, torch.device("cpu")), cache)
    assert computed == [8] * 6 + [8, 8] + [2] * 4
    assert torch.equal(last, every[[4, 7]])


class Counted:
    """A backend but for one operation."""

    def __init__(self, backend: Any, input_glu: Any) -> None:
        self._backend, self.input_glu = backend, input_glu

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)
