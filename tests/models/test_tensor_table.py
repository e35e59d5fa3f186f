"""A file must have the tensors of its configuration, no fewer, of the right shape, and none that would be ignored."""

import logging
from dataclasses import replace

import pytest

from quengine.models.architectures import ARCHITECTURES
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.tensor_table import (
    FLOAT_TYPES,
    QUANT_TYPES,
    check_tensors,
    required_tensors,
)
from tests.gguf_builder import GGUFBuilder, ModelSizes, model_builder


def check(tmp_path, builder: GGUFBuilder) -> None:
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        check_tensors(file, read_gguf_config(file))


def without(builder: GGUFBuilder, name: str) -> GGUFBuilder:
    builder.tensors = [t for t in builder.tensors if t.name != name]
    return builder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_whole_models_pass_without_a_warning(tmp_path, caplog, architecture, tied):
    check(tmp_path, model_builder(ModelSizes(architecture), tied=tied))
    assert not caplog.records


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_missing_tensor_is_named(tmp_path, architecture):
    names = [t.name for t in model_builder(ModelSizes(architecture)).tensors]
    # Without an output matrix the embedding is used, without kinds of segments or a convolution's bias none are added:
    # none of these is broken.
    for name in set(names) - {"output.weight", "token_types.weight", "blk.0.ssm_conv1d.bias"}:
        with pytest.raises(GGUFError) as caught:
            check(tmp_path, without(model_builder(ModelSizes(architecture)), name))
        assert caught.value.field == f"tensor {name}" and "missing" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("token_embd.weight", (263, 64)),
        ("blk.0.attn_q.weight", (32, 64)),
        ("blk.1.attn_k.weight", (64, 32)),
        ("blk.0.ffn_down.weight", (96, 64)),
        ("output_norm.weight", (63,)),
        ("output_norm.weight", (1, 64)),
        ("output.weight", (264, 64, 1)),
    ],
)
def test_a_wrong_shape_is_refused_with_both(tmp_path, name, shape):
    builder = without(model_builder(), name).tensor(name, shape)
    with pytest.raises(GGUFError) as caught:
        check(tmp_path, builder)
    assert caught.value.field == f"tensor {name}" and str(list(shape)) in str(caught.value)
    assert caught.value.offset is not None


@pytest.mark.parametrize(("name", "kind"), [("output_norm.weight", "Q8_0"), ("output.weight", "I32")])
def test_types_that_cannot_be_computed_with_are_refused(tmp_path, name, kind):
    builder = model_builder()
    (old,) = (t for t in builder.tensors if t.name == name)
    with pytest.raises(GGUFError, match=f"type {kind} is not supported"):
        check(tmp_path, without(builder, name).tensor(name, old.shape, kind))


def test_unused_tensors_are_named_in_one_warning(tmp_path, caplog):
    builder = model_builder()
    for i in range(10):
        builder.tensor(f"extra.{i}", (4,))
    with caplog.at_level(logging.WARNING):
        check(tmp_path, builder)
    (record,) = caplog.records
    assert "10 tensors that nothing uses: extra.0, extra.1" in record.getMessage()
    assert "and 2 more" in record.getMessage()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_output.bias", (64,)),
        ("blk.1.attn_sinks.weight", (4,)),
        ("blk.1.ffn_up.bias", (96,)),
        ("blk.0.attn_q_norm.weight", (16,)),
        ("blk.0.ffn_gate_inp.weight", (2, 64)),
        ("blk.1.attn_k.bias", (32,)),
        ("output.bias", (264,)),
        ("cls.output.weight", (2, 64)),
        ("dense_2.weight", (64, 64)),
    ],
)
def test_tensors_that_would_change_the_result_are_never_passed_over(tmp_path, name, shape):
    with pytest.raises(GGUFError, match="is not implemented"):
        check(tmp_path, model_builder().tensor(name, shape))


def test_a_llama_model_with_query_key_value_biases_passes(tmp_path):
    builder = model_builder()
    for i in range(2):
        for name, size in (("q", 64), ("k", 32), ("v", 32)):
            builder.tensor(f"blk.{i}.attn_{name}.bias", (size,))
    check(tmp_path, builder)


def test_sinks_and_an_output_bias_are_needed_where_they_are_declared(tmp_path):
    def checked(builder: GGUFBuilder) -> None:
        with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
            config = read_gguf_config(file)
            block = config.block.with_attention(sinks=True, output_bias=True)
            check_tensors(file, replace(config, block=block))

    names = {"attn_sinks.weight": (4,), "attn_output.bias": (64,)}

    def whole() -> GGUFBuilder:
        builder = model_builder()
        for i in range(2):
            for name, shape in names.items():
                builder.tensor(f"blk.{i}.{name}", shape)
        return builder

    checked(whole())
    for name in names:
        with pytest.raises(GGUFError, match="missing"):
            checked(without(whole(), f"blk.1.{name}"))
        with pytest.raises(GGUFError, match=r"shape \[3\]"):
            checked(without(whole(), f"blk.0.{name}").tensor(f"blk.0.{name}", (3,)))


def test_a_hostile_name_stays_out_of_the_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        check(tmp_path, model_builder().tensor("\x1b[31mred", (4,)))
    (record,) = caplog.records
    assert "\x1b" not in record.getMessage()


def test_the_sets_of_types_cover_what_the_kernels_have():
    from quengine.kernels.block_formats import FORMATS, NVFP4_SCALED

    assert set(FORMATS) == FLOAT_TYPES | QUANT_TYPES | {NVFP4_SCALED}


def test_required_tensors_are_those_the_builder_makes():
    sizes = ModelSizes("qwen3")
    config = read_hf_config(
        {
            "model_type": "qwen3",
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
        }
    )
    assert required_tensors(config) == sizes.tensor_shapes(300)


def mixture(architecture: str = "llama", separate: bool = True) -> GGUFBuilder:
    return model_builder(ModelSizes(architecture, experts=4, separate=separate))


@pytest.mark.parametrize("architecture", ["llama", "qwen2moe", "qwen3moe", "olmoe"])
@pytest.mark.parametrize("separate", [False, True])
def test_experts_are_in_one_tensor_or_in_one_each(tmp_path, caplog, architecture, separate):
    check(tmp_path, mixture(architecture, separate))
    assert not caplog.records


def test_layers_may_have_experts_in_different_forms(tmp_path, caplog):
    builder = mixture()
    builder.tensors = [t for t in builder.tensors if not t.name.startswith("blk.1.ffn_up.")]
    check(tmp_path, builder.tensor("blk.1.ffn_up_exps.weight", (4, 96, 64)))
    assert not caplog.records


def test_gate_and_up_may_be_in_one_tensor_of_some_layers(tmp_path, caplog):
    builder = mixture()
    builder.tensors = [
        t for t in builder.tensors if not t.name.startswith(("blk.1.ffn_gate.", "blk.1.ffn_up."))
    ]
    check(tmp_path, builder.tensor("blk.1.ffn_gate_up_exps.weight", (4, 192, 64)))
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "shape", "kind", "problem"),
    [
        ("blk.0.ffn_gate_up_exps.weight", (4, 96, 64), "F32", r"shape \[4, 96, 64\] .* needs \[4, 192, 64\]"),
        ("blk.0.ffn_gate_up_exps.weight", (768, 64), "F32", r"shape \[768, 64\] .* needs \[4, 192, 64\]"),
        ("blk.1.ffn_gate_up_exps.weight", (4, 192, 64), "I32", "type I32 is not supported"),
        ("blk.1.ffn_gate_up_exps.bias", (4, 192), "F32", "is not implemented"),
        ("blk.1.ffn_gate_exps.weight", (4, 96, 64), "F32", "is not implemented"),
        ("blk.1.ffn_up_exps.weight", (4, 96, 64), "F32", "is not implemented"),
    ],
)
def test_gate_and_up_in_one_tensor_are_checked(tmp_path, name, shape, kind, problem):
    builder = model_builder(ModelSizes(experts=4, gate_up=True))
    check(tmp_path, builder)
    with pytest.raises(GGUFError, match=problem) as caught:
        check(tmp_path, without(builder, name).tensor(name, shape, kind))
    assert caught.value.field == f"tensor {name}" and "\n" not in str(caught.value)


def test_of_gate_and_up_in_one_tensor_what_is_missing_is_named(tmp_path):
    builder = model_builder(ModelSizes(experts=4, gate_up=True))
    for name in ("ffn_down_exps", "ffn_gate_up_exps"):
        with pytest.raises(GGUFError, match="missing") as caught:
            check(tmp_path, without(builder, f"blk.1.{name}.weight"))
        named = {"ffn_gate_up_exps": "ffn_gate_exps"}.get(name, name)
        builder = model_builder(ModelSizes(experts=4, gate_up=True))
        assert caught.value.field == f"tensor blk.1.{named}.weight"


@pytest.mark.parametrize("name", ["blk.0.ffn_gate.0.weight", "blk.1.ffn_down.3.weight"])
def test_a_missing_expert_is_named(tmp_path, name):
    with pytest.raises(GGUFError) as caught:
        check(tmp_path, without(mixture(), name))
    assert caught.value.field == f"tensor {name}" and "missing" in str(caught.value)


def test_a_layer_without_experts_is_missing_the_tensor_of_all(tmp_path):
    builder = mixture()
    builder.tensors = [t for t in builder.tensors if not t.name.startswith("blk.0.ffn_up.")]
    with pytest.raises(GGUFError) as caught:
        check(tmp_path, builder)
    assert caught.value.field == "tensor blk.0.ffn_up_exps.weight" and "missing" in str(caught.value)


def test_experts_of_different_types_are_refused(tmp_path):
    builder = without(mixture(), "blk.0.ffn_up.2.weight").tensor("blk.0.ffn_up.2.weight", (96, 64), "Q8_0")
    with pytest.raises(GGUFError, match=r"type Q8_0 differs from blk.0.ffn_up.0.weight's, F32"):
        check(tmp_path, builder)


@pytest.mark.parametrize(
    ("name", "shape", "separate"),
    [
        ("blk.0.ffn_gate_inp.weight", (5, 64), False),
        ("blk.0.ffn_gate_exps.weight", (5, 96, 64), False),
        ("blk.0.ffn_up_exps.weight", (4, 95, 64), False),
        ("blk.0.ffn_down_exps.weight", (4, 96, 64), False),
        ("blk.0.ffn_down_exps.weight", (256, 96), False),
        ("blk.0.ffn_down.1.weight", (96, 64), True),
        ("blk.0.ffn_gate.3.weight", (1, 96, 64), True),
    ],
)
def test_a_wrong_shape_of_experts_is_refused_with_both(tmp_path, name, shape, separate):
    with pytest.raises(GGUFError) as caught:
        check(tmp_path, without(mixture(separate=separate), name).tensor(name, shape))
    assert caught.value.field == f"tensor {name}" and str(list(shape)) in str(caught.value)


def test_the_shared_experts_gate_may_be_a_row(tmp_path):
    name = "blk.0.ffn_gate_inp_shexp.weight"
    builder = mixture("qwen2moe", separate=False)
    check(tmp_path, without(builder, name).tensor(name, (1, 64)))
    with pytest.raises(GGUFError, match=r"shape \[2, 64\]"):
        check(tmp_path, without(builder, name).tensor(name, (2, 64)))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.ffn_up_shexp.weight", (96, 64)),
        ("blk.0.ffn_gate_up_exps.weight", (4, 192, 64)),
        ("blk.0.ffn_up_exps.bias", (4, 96)),
        ("blk.0.ffn_up_exps.scale", (4,)),
        ("blk.1.ffn_gate_inp.bias", (4,)),
        ("blk.1.exp_probs_b.bias", (4,)),
    ],
)
def test_tensors_of_experts_that_would_change_the_result_are_never_passed_over(tmp_path, name, shape):
    with pytest.raises(GGUFError, match="is not implemented"):
        check(tmp_path, mixture(separate=False).tensor(name, shape))
