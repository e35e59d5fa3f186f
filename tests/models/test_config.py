"""ModelConfig from GGUF metadata and from config.json: the same models, the same refusals."""

import math
from dataclasses import asdict, replace

import numpy as np
import pytest

from quengine.errors import EngineError
from quengine.memory import kv_cache_bytes
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import CacheGroup, ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.rotation import RopeScaling, yarn_attention_factor
from tests.each_case import each_case
from tests.gguf_builder import GGUFBuilder, ModelSizes, bpe_vocabulary, model_builder, spm_vocabulary

NAN, INF = float("nan"), float("inf")


def from_metadata(tmp_path, changes=None, architecture="llama", tensors=()):
    """The configuration of a vocabulary-only file with `changes` to the metadata; None drops a key."""
    values = {**ModelSizes(architecture).metadata(), **spm_vocabulary(), **(changes or {})}
    builder = GGUFBuilder()
    for key, value in values.items():
        if isinstance(value, tuple):
            builder.kv(key, *value)
        elif value is not None:
            builder.kv(key, value)
    for name, data in tensors:
        builder.tensor(name, data.shape, "F32", data)
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        return read_gguf_config(file)


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [("llama", "pairs"), ("mistral3", "pairs"), ("qwen2", "halves"), ("qwen3", "halves")],
)
def test_sizes_and_traits_come_from_the_metadata(tmp_path, architecture, layout):
    vocabulary = bpe_vocabulary()
    path = model_builder(ModelSizes(architecture), vocabulary).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        config = read_gguf_config(file)
    assert config == ModelConfig(
        architecture=architecture,
        name=f"tiny {architecture}",
        block=BlockForm(
            AttentionForm(
                rope_layout=layout,
                qkv_bias=architecture == "qwen2",
                qk_norm="head" if architecture == "qwen3" else None,
            )
        ),
        vocab_size=260,
        context_length=128,
        embedding_length=64,
        block_count=2,
        feed_forward_length=96,
        head_count=4,
        head_count_kv=2,
        head_dim=16,
        rope_dim=16,
        rope_freq_base=10000.0,
        rope_scaling=RopeScaling(original_context_length=128),
        rms_eps=float(np.float32(1e-5)),
    )


def test_defaults_where_the_file_is_silent(tmp_path):
    silent = ("key_length", "value_length", "head_count_kv")
    changes = {f"llama.attention.{k}": None for k in silent}
    changes |= {"llama.rope.dimension_count": None, "llama.rope.freq_base": None, "general.name": None}
    config = from_metadata(tmp_path, changes)
    assert (config.head_dim, config.head_count_kv, config.rope_dim) == (16, 4, 16)
    assert (config.rope_freq_base, config.name) == (10000.0, "llama")


def test_a_head_size_of_its_own_and_partial_rotation(tmp_path):
    changes = {
        "llama.attention.key_length": 40,
        "llama.attention.value_length": 40,
        "llama.rope.dimension_count": 20,
    }
    config = from_metadata(tmp_path, changes)
    assert (config.head_dim, config.rope_dim, config.rotation(0).spec().dim) == (40, 20, 20)


def test_the_output_is_tied_where_its_matrix_is_absent(tmp_path):
    for tied in (False, True):
        with open_gguf(model_builder(tied=tied).write(tmp_path / "m.gguf")) as file:
            assert read_gguf_config(file).tied_output is tied


def test_counts_given_per_layer_are_accepted_when_all_equal(tmp_path):
    config = from_metadata(tmp_path, {"llama.attention.head_count_kv": ([2, 2], "int32")})
    assert config.head_count_kv == 2
    with pytest.raises(GGUFError, match=r"head_count_kv.*differs between layers"):
        from_metadata(tmp_path, {"llama.attention.head_count_kv": ([2, 4], "int32")})
    with pytest.raises(GGUFError, match="differs between layers"):
        from_metadata(tmp_path, {"llama.feed_forward_length": ([], "int32")})
    with pytest.raises(GGUFError, match="must be an array of integers"):
        from_metadata(tmp_path, {"llama.attention.head_count": [4.0, 4.0]})


def test_a_sliding_window_of_zero_is_none(tmp_path):
    assert from_metadata(tmp_path, {"llama.attention.sliding_window": 0}).sliding_window is None
    assert from_metadata(tmp_path, {"llama.attention.sliding_window": 64}).sliding_window == 64


@pytest.mark.parametrize("architecture", ["rwkv7", "phi2", "clip", "", "LLAMA"])
def test_other_architectures_are_named_with_those_supported(tmp_path, architecture):
    with pytest.raises(EngineError) as caught:
        from_metadata(tmp_path, {"general.architecture": architecture})
    assert repr(architecture) in str(caught.value)
    assert "llama, mistral3, qwen2, qwen3" in str(caught.value)


@pytest.mark.parametrize("architecture", ["mistral3", "qwen2", "qwen3", "olmo2", "gemma3", "phi3"])
def test_experts_of_an_architecture_that_has_none_are_refused_by_name(tmp_path, architecture):
    key = f"{architecture}.expert_count"
    with pytest.raises(
        EngineError, match=f"'{architecture}' with 8 experts .* is not supported; supported are"
    ):
        from_metadata(tmp_path, {key: 8}, architecture)


INTEGER_KEYS = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "rope.dimension_count",
)


@each_case("key", INTEGER_KEYS)
@each_case("value", [0, (-1, "int32"), (2**31, "uint32"), (2**63, "uint64"), 2.0, "2", True])
def test_counts_of_zero_or_huge_or_of_another_type_are_refused(tmp_path, key, value):
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, {f"llama.{key}": value})
    assert caught.value.field == f"llama.{key}" and caught.value.offset is not None


@pytest.mark.parametrize("key", INTEGER_KEYS[:5])
def test_missing_sizes_are_refused(tmp_path, key):
    with pytest.raises(GGUFError, match=f"{key}: missing"):
        from_metadata(tmp_path, {f"llama.{key}": None})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attention.head_count_kv": 3}, "attention.head_count"),
        ({"attention.head_count": 2, "attention.head_count_kv": 4}, "attention.head_count"),
        ({"attention.head_count": 5, "attention.key_length": None}, "embedding_length"),
        ({"attention.value_length": 8}, "attention.value_length"),
        ({"rope.dimension_count": 15}, "rope.dimension_count"),
        ({"rope.dimension_count": 32}, "rope.dimension_count"),
        ({"attention.layer_norm_rms_epsilon": None}, "attention.layer_norm_rms_epsilon"),
        *[
            ({"attention.layer_norm_rms_epsilon": e}, "attention.layer_norm_rms_epsilon")
            for e in (NAN, INF, 0.0, -1e-5, 1)
        ],
        *[({"rope.freq_base": b}, "rope.freq_base") for b in (NAN, INF, 0.0, -1e4, 10000)],
        *[({"rope.scaling.factor": f}, "rope.scaling.factor") for f in (NAN, INF, -2.0)],
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 0},
            "rope.scaling.original_context_length",
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": -1.0}, "rope.scaling.yarn_beta_fast"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": NAN},
            "rope.scaling.yarn_log_multiplier",
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor"),
        ({"rope.scaling.attn_factor": 0.0}, "rope.scaling.attn_factor"),
        ({"attention.temperature_scale": NAN}, "attention.temperature_scale"),
        ({"attention.sliding_window": (-1, "int32")}, "attention.sliding_window"),
        ({"attention.scale": 0.5}, "attention.scale"),
        ({"attention.causal": False}, "attention.causal"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"attention.sliding_window_pattern": ([True, False], "bool")}, "attention.sliding_window_pattern"),
    ],
)
def test_values_at_odds_or_beyond_the_decoder_are_refused(tmp_path, changes, field):
    with pytest.raises(GGUFError) as caught:
        from_metadata(tmp_path, {f"llama.{key}": value for key, value in changes.items()})
    assert caught.value.field == f"llama.{field}"


def test_neutral_values_of_unimplemented_keys_are_accepted(tmp_path):
    neutral = {"llama.attention.scale": 0.0, "llama.attention.causal": True, "llama.logit_scale": 0.0}
    assert from_metadata(tmp_path, neutral) == from_metadata(tmp_path)


def test_a_huge_chat_template_is_refused(tmp_path):
    with pytest.raises(GGUFError, match=r"chat_template.*at most 1048576"):
        from_metadata(tmp_path, {"tokenizer.chat_template": "x" * (2**20 + 1)})


def test_the_vocabulary_size_is_the_tokenizers_else_the_key(tmp_path):
    assert from_metadata(tmp_path, {"llama.vocab_size": 999}).vocab_size == 264
    no_tokens = {"tokenizer.ggml.tokens": None, "llama.vocab_size": 999}
    assert from_metadata(tmp_path, no_tokens).vocab_size == 999
    with pytest.raises(GGUFError, match="vocab_size: missing"):
        from_metadata(tmp_path, {"tokenizer.ggml.tokens": None})
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.tokens"):
        from_metadata(tmp_path, {"tokenizer.ggml.tokens": ([], "string")})


@pytest.mark.parametrize(
    ("changes", "kind", "factor"),
    [
        ({}, "none", 1.0),
        ({"factor": 4.0}, "linear", 4.0),
        ({"factor": 0.0}, "none", 1.0),
        ({"type": "none", "factor": 4.0}, "none", 1.0),
        ({"type": "linear", "factor": 4.0}, "linear", 4.0),
        ({"type": "linear"}, "none", 1.0),
        ({"type": "yarn", "factor": 4.0}, "yarn", 4.0),
    ],
)
def test_rope_scaling_kinds(tmp_path, changes, kind, factor):
    scaling = from_metadata(tmp_path, {f"llama.rope.scaling.{k}": v for k, v in changes.items()}).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context_length) == (kind, factor, 128)


def test_the_old_key_of_linear_scaling_still_counts(tmp_path):
    scaling = from_metadata(tmp_path, {"llama.rope.scale_linear": 2.0}).rope_scaling
    assert (scaling.kind, scaling.factor) == ("linear", 2.0)


def test_yarn_of_a_ministral_file(tmp_path):
    """The values that the converter writes for Ministral 3: its own magnitude cancels, queries get hotter."""
    values = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 16384,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_log_multiplier": 1.0,
        "attention.temperature_scale": 0.1,
    }
    config = from_metadata(tmp_path, {f"mistral3.{k}": v for k, v in values.items()}, "mistral3")
    assert config.rope_scaling == RopeScaling("yarn", 16.0, 16384, attention_factor=1.0)
    assert config.attention_temperature_scale == pytest.approx(0.1)
    assert config.attention_temperature_length == 16384
    assert config.rotation(0).spec().attention_factor == 1.0


def test_the_magnitude_of_yarn(tmp_path):
    yarn = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    own = 0.1 * math.log(4.0) + 1.0
    assert from_metadata(tmp_path, yarn).rope_scaling.attention_factor == pytest.approx(own)
    given = yarn | {"llama.rope.scaling.yarn_attn_factor": 1.25, "llama.rope.scaling.attn_factor": 2.0}
    assert from_metadata(tmp_path, given).rope_scaling.attention_factor == pytest.approx(2.5)
    assert yarn_attention_factor(4.0, 0.707) == pytest.approx(own / (0.0707 * math.log(4.0) + 1.0))
    assert yarn_attention_factor(0.5) == 1.0


def test_frequency_factors_are_llama_3_scaling(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    config = from_metadata(tmp_path, tensors=[("rope_freqs.weight", factors)])
    assert config.rope_scaling.kind == "llama3"
    assert (
        config.rope_scaling.freq_factors == tuple(factors.tolist()) == config.rotation(0).spec().freq_factors
    )
    assert config.rotation(0).spec().scaling == "none"


@pytest.mark.parametrize(
    "factors", [np.ones(7, np.float32), np.array([1] * 7 + [0], np.float32), np.array([NAN] * 8, np.float32)]
)
def test_bad_frequency_factors_are_refused(tmp_path, factors):
    with pytest.raises(GGUFError, match=r"rope_freqs\.weight"):
        from_metadata(tmp_path, tensors=[("rope_freqs.weight", factors)])


def test_kv_cache_bytes():
    config = read_hf_config(LLAMA)
    assert kv_cache_bytes(config, 10) == 2 * 2 * 2 * 16 * 10 * 2
    wide = replace(config, head_dim=64)
    assert kv_cache_bytes(wide, 10, "q8_0") == 2 * 2 * 2 * 10 * 64 * 34 // 32
    with pytest.raises(EngineError, match="multiple of 32, and this model's is 16; use --cache-type f16"):
        kv_cache_bytes(config, 10, "q8_0")


LLAMA = {
    "model_type": "llama",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}


def hf(**changes):
    return read_hf_config({k: v for k, v in (LLAMA | changes).items() if v is not None})


def test_config_json_and_gguf_give_the_same(tmp_path):
    ours = asdict(from_metadata(tmp_path))
    theirs = asdict(hf())
    assert theirs.pop("rms_eps") == pytest.approx(ours.pop("rms_eps"))
    assert theirs.pop("name") == "llama" and ours.pop("name")
    assert theirs == ours


@pytest.mark.parametrize(
    ("model_type", "architecture", "bias", "norm"),
    [
        ("llama", "llama", False, None),
        ("mistral", "llama", False, None),
        ("ministral3", "mistral3", False, None),
        ("qwen2", "qwen2", True, None),
        ("qwen3", "qwen3", False, "head"),
    ],
)
def test_model_types(model_type, architecture, bias, norm):
    config = hf(model_type=model_type)
    assert (config.architecture, config.block.attention.qkv_bias, config.block.attention.qk_norm) == (
        architecture,
        bias,
        norm,
    )


def test_the_text_half_of_a_mistral3_checkpoint():
    text = LLAMA | {"model_type": "mistral", "sliding_window": None}
    config = read_hf_config({"model_type": "mistral3", "text_config": text, "vision_config": {}})
    assert config.architecture == "mistral3" and config.embedding_length == 64
    with pytest.raises(EngineError, match="supported are"):
        read_hf_config({"model_type": "mistral3", "text_config": LLAMA | {"model_type": "jamba"}})


@pytest.mark.parametrize("model_type", ["rwkv7", "jamba", "mamba2", None, 3, ["llama"]])
def test_other_model_types_are_refused(model_type):
    with pytest.raises(EngineError, match="supported are llama, mistral3, qwen2, qwen3"):
        read_hf_config(LLAMA | {"model_type": model_type})


def test_rope_parameters_of_newer_checkpoints():
    config = hf(rope_theta=None, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    assert config == hf(rope_theta=5e5)


def test_rope_scaling_of_config_json():
    assert hf(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling("linear", 2.0, 128)
    yarn = hf(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32})
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, 32, attention_factor=0.1 * math.log(4.0) + 1.0)
    both = {
        "rope_type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    config = hf(model_type="ministral3", rope_parameters=both | {"original_max_position_embeddings": 32})
    assert config.rope_scaling.attention_factor == pytest.approx(1.0)
    assert (config.attention_temperature_scale, config.attention_temperature_length) == (0.1, 32)
    given = hf(rope_scaling={"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5})
    assert given.rope_scaling.attention_factor == 1.5


def test_llama3_scaling_becomes_frequency_factors():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = hf(rope_theta=5e5, head_dim=128, rope_scaling=scaling)
    factors = config.rope_scaling.freq_factors
    assert len(factors) == 64
    # Fast dimensions keep their frequency, the slowest turn 8 times slower, none is outside.
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(8.0)
    assert list(factors) == sorted(factors)


def test_sliding_windows_of_config_json():
    assert hf(model_type="mistral", sliding_window=64).sliding_window == 64
    assert hf(model_type="mistral").sliding_window == 4096
    assert read_hf_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).sliding_window is None
    assert hf(sliding_window=64).sliding_window is None
    assert hf(model_type="qwen2", sliding_window=64).sliding_window is None
    assert hf(model_type="qwen2", sliding_window=64, use_sliding_window=True).sliding_window is None
    every = hf(model_type="qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=0)
    assert every.sliding_window == 64
    last = hf(model_type="qwen3", sliding_window=64, use_sliding_window=True, max_window_layers=1)
    assert last.layer_windows == (None, 64)
    given = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert hf(model_type="qwen3", sliding_window=64, **given).layer_windows == (64, None)


def test_layers_that_keep_the_same_positions_are_a_group():
    config = hf(num_hidden_layers=5)
    assert config.cache_groups == (CacheGroup(None, (0, 1, 2, 3, 4)),)
    windowed = replace(config, sliding_window=8)
    assert windowed.cache_groups == (CacheGroup(8, (0, 1, 2, 3, 4)),)
    mixed = replace(windowed, full_attention_layers=(1, 4))
    assert mixed.layer_windows == (8, None, 8, 8, None)
    assert mixed.cache_groups == (CacheGroup(None, (1, 4)), CacheGroup(8, (0, 2, 3)))


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": None},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": True},
        {"num_attention_heads": 2**40},
        {"num_key_value_heads": 3},
        {"hidden_size": 63},
        {"head_dim": 15},
        {"rms_norm_eps": 0.0},
        {"rms_norm_eps": "small"},
        {"rope_theta": -1.0},
        {"partial_rotary_factor": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": "linear"},
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 0.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"num_local_experts": 8},
        {"quantization_config": {"quant_method": "gptq"}},
        {"model_type": "mistral", "sliding_window": "all"},
        {"model_type": "mistral", "sliding_window": 0},
        {"model_type": "mistral", "layer_types": ["sliding_attention"]},
        {"model_type": "mistral", "layer_types": ["sliding_attention", "chunked_attention"]},
        {"model_type": "mistral", "layer_types": "sliding_attention"},
    ],
    ids=str,
)
def test_bad_config_json_values_are_refused_in_one_line(changes):
    with pytest.raises(EngineError) as caught:
        hf(**changes)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, GGUFError)


def test_the_kernels_rope_takes_every_kind():
    base = hf()
    for scaling in (
        RopeScaling("linear", 2.0),
        RopeScaling("yarn", 4.0, 32),
        RopeScaling("llama3", freq_factors=(1.0,) * 8),
    ):
        spec = replace(base, rope_scaling=scaling).rotation(0).spec()
        assert (spec.dim, spec.base, spec.layout) == (16, 10000.0, "pairs")
