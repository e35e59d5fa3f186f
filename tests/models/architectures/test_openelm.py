"""OpenELM as a folder and as GGUF: layers of unlike sizes.

`transformers` has no OpenELM; its layers are those of Qwen3, each with sizes of its own, which is what computes the
logits here. llama.cpp has one, and computes those of the GGUF file.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.models.config import LayerSizes
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.tensor_table import required_tensors
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import Conversion, convert, write_sentencepiece
from tests.llama_cpp_logits import llama_cpp_logits
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened, path_of
from tests.transformers_models import nmse, our_logits, token_ids

WIDTH, HEAD_DIM = 64, 16
SIZES = [LayerSizes(2, 1, 64), LayerSizes(2, 1, 96), LayerSizes(4, 2, 96), LayerSizes(6, 3, 128)]
ALIKE = [LayerSizes(4, 2, 96)] * 2

CASES = {
    "plain": Case("openelm", tokenizer=""),
    "alike": Case("openelm", tokenizer=""),
    "untied": Case("openelm", {"share_input_output_layers": False}, tokenizer="", converts=False),
}
OF_CASE = {"plain": SIZES, "alike": ALIKE, "untied": SIZES}

LLAMA_CPP_TOLERANCE = 1e-5
"""Of logits of llama.cpp, whose cache is fp16."""


def config_json(sizes: list[LayerSizes], vocab: int, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["OpenELMForCausalLM"],
        "model_type": "openelm",
        "activation_fn_name": "swish",
        "ffn_dim_divisor": 16,
        "ffn_multipliers": [layer.feed_forward_length / WIDTH for layer in sizes],
        "ffn_with_glu": True,
        "head_dim": HEAD_DIM,
        "max_context_length": 128,
        "model_dim": WIDTH,
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "num_kv_heads": [layer.head_count_kv for layer in sizes],
        "num_query_heads": [layer.head_count for layer in sizes],
        "num_transformer_layers": len(sizes),
        "rope_freq_constant": 10000,
        "share_input_output_layers": True,
        "vocab_size": vocab,
        **changes,
    }


def qwen3(sizes: list[LayerSizes], vocab: int, tied: bool) -> Any:
    """A Qwen3 in fp64 whose layers have these sizes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    def config(layer: LayerSizes) -> Any:
        return Qwen3Config(
            vocab_size=vocab,
            hidden_size=WIDTH,
            head_dim=HEAD_DIM,
            num_hidden_layers=len(sizes),
            num_attention_heads=layer.head_count,
            num_key_value_heads=layer.head_count_kv,
            intermediate_size=layer.feed_forward_length,
            rms_norm_eps=1e-6,
            rope_theta=10000.0,
            tie_word_embeddings=tied,
            initializer_range=0.12,
            attn_implementation="eager",
        )

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config(sizes[-1]))
    layers = [Qwen3DecoderLayer(config(layer), i) for i, layer in enumerate(sizes)]
    model.model.layers = torch.nn.ModuleList(layers)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.2 if "norm" in name else 0.12))
            if "norm" in name:
                weight.add_(1.0)
    return model.double().eval()


def openelm_tensors(weights: dict[str, Tensor], layers: int, tied: bool) -> dict[str, Tensor]:
    """As released folders name them."""
    found = {
        "transformer.token_embeddings.weight": weights["model.embed_tokens.weight"],
        "transformer.norm.weight": weights["model.norm.weight"],
    }
    for i in range(layers):
        ours, theirs = f"transformer.layers.{i}", f"model.layers.{i}"
        qkv = [weights[f"{theirs}.self_attn.{name}_proj.weight"] for name in "qkv"]
        gate_up = [weights[f"{theirs}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        found |= {
            f"{ours}.attn_norm.weight": weights[f"{theirs}.input_layernorm.weight"],
            f"{ours}.attn.qkv_proj.weight": torch.cat(qkv),
            f"{ours}.attn.q_norm.weight": weights[f"{theirs}.self_attn.q_norm.weight"],
            f"{ours}.attn.k_norm.weight": weights[f"{theirs}.self_attn.k_norm.weight"],
            f"{ours}.attn.out_proj.weight": weights[f"{theirs}.self_attn.o_proj.weight"],
            f"{ours}.ffn_norm.weight": weights[f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.ffn.proj_1.weight": torch.cat(gate_up),
            f"{ours}.ffn.proj_2.weight": weights[f"{theirs}.mlp.down_proj.weight"],
        }
    return found if tied else {**found, "lm_head.weight": weights["lm_head.weight"]}


def write_cases(root: Path, cases: dict[str, Case]) -> Path:
    """As that of both_files."""
    jobs = []
    for name, case in cases.items():
        sizes, folder = OF_CASE[name], root / name
        folder.mkdir()
        tied = case.config.get("share_input_output_layers", True)
        model = qwen3(sizes, case.vocab, tied)
        weights = {key: value.float().contiguous() for key, value in model.state_dict().items()}
        save_file(openelm_tensors(weights, len(sizes), tied), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config_json(sizes, case.vocab, **case.config)))
        write_sentencepiece(folder)
        model.load_state_dict({key: value.double() for key, value in weights.items()})
        with torch.no_grad():
            torch.save(model(token_ids(case.vocab)[None]).logits[0], root / f"{name}.pt")
        if case.converts:
            jobs.append(Conversion(folder, path_of(root, name, "gguf"), ""))
    convert(jobs)
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cases(tmp_path_factory.mktemp("models"), CASES)


class TestLogits(SameLogits):
    main = ("plain",)
    engine_kinds = ("gguf",)  # released folders have no tokenizer


@pytest.mark.parametrize("name", ["plain", "alike"])
def test_llama_cpp_has_them_too(root: Path, name: str) -> None:
    theirs = llama_cpp_logits(path_of(root, name, "gguf"), CASES[name].vocab)
    assert theirs is not None
    ours = our_logits(opened(root, name, "gguf"), CASES[name].vocab)
    assert nmse(ours, torch.from_numpy(theirs).double()) < LLAMA_CPP_TOLERANCE


def test_layers_have_the_sizes_of_the_file(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.layer_sizes == tuple(SIZES)
        assert (config.head_count, config.head_count_kv, config.feed_forward_length) == (6, 3, 128)
        alike = opened(root, "alike", kind).config
        assert alike.layer_sizes == () and alike.sizes(1) == ALIKE[1]


def test_sequences_of_a_batch_get_what_they_get_alone(root: Path) -> None:
    """With blocks of layers of unlike rows, prompts in chunks, preemption, and q8_0."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [token_ids(32768)[:length].tolist() for length in (3, 20, 33)]
    path = root / "wide.gguf"
    _write_wide(path)
    for cache_type in ("f16", "q8_0"):
        options: dict[str, Any] = {"device": "cpu", "threads": 1, "ctx_size": 64, "cache_type": cache_type}
        with LLM(path, **options) as llm:
            alone = [llm.generate([prompt], params)[0].tokens for prompt in prompts]
        with LLM(path, **options, parallel=3, chunk_size=8) as llm:
            assert [each.tokens for each in llm.generate(prompts, params)] == alone


def _write_wide(path: Path) -> None:
    """A file whose heads of 32 a cache of q8_0 can store."""
    sizes = tuple(LayerSizes(*layer[:2], 128) for layer in SIZES)
    spec = replace(
        PRESETS["openelm-tiny"],
        vocab_size=32768,
        embedding_length=64,
        block_count=len(sizes),
        head_dim=32,
        layer_sizes=sizes,
        quant="Q8_0",
        context_length=64,
    )
    write_synthetic(path, spec)


def test_the_released_shapes() -> None:
    config = PRESETS["openelm-270m"].config()
    assert [sizes.head_count for sizes in config.layer_sizes] == [12] * 5 + [16] * 7 + [20] * 4
    assert [sizes.head_count_kv for sizes in config.layer_sizes] == [3] * 5 + [4] * 7 + [5] * 4
    total = sum(int(torch.tensor(shape).prod()) for shape in required_tensors(config).values())
    assert total == 271_527_168


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": [1, 1]}, "num_kv_heads: is not a list of numbers, one for each of 4 layers"),
        ({"num_query_heads": 4}, "num_query_heads: is not a list"),
        ({"num_query_heads": [2, 2, 4, "6"]}, "num_query_heads: '6' is not an integer"),
        (
            {"num_query_heads": [2, 2, 5, 6]},
            "num_query_heads: 5 is not a multiple of the 2 key",
        ),
        ({"ffn_multipliers": [1.0, True, 1.0, 1.0]}, "ffn_multipliers: True is not a number"),
        ({"ffn_multipliers": [1.0, -1e29, 1.0, 1.0]}, "ffn_multipliers: -1e.29 makes no feed-forward"),
        ({"ffn_multipliers": [1.0, 1e29, 1.0, 1.0]}, "ffn_multipliers: 1e.29 makes no feed-forward"),
        ({"max_context_length": 0}, "max_context_length: 0 is not from 1"),
        ({"normalize_qk_projections": False}, "normalize_qk_projections: False is not implemented"),
        ({"ffn_with_glu": False}, "ffn_with_glu: False is not implemented"),
        ({"activation_fn_name": "gelu"}, "activation_fn_name: 'gelu' is not implemented"),
    ],
)
def test_other_folders_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_hf_config(config_json(SIZES, 100, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.head_count": [4]}, r"head_count \(byte \d+\): has 1 numbers for 2 layers"),
        ({"attention.head_count": [4, 0]}, r"head_count \(byte \d+\): 0 is not from 1"),
        ({"attention.head_count": [4, 6]}, r"head_count \(byte \d+\): 6 is not a multiple of the 4"),
        ({"attention.key_length": None}, "openelm.attention.key_length: missing: layers differ"),
        ({"feed_forward_length": None}, "openelm.feed_forward_length: missing"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    keys = {f"openelm.{key}": value for key, value in changes.items()}
    builder = model_builder(ModelSizes("openelm"), changes=keys)
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file, pytest.raises(GGUFError, match=message):
        read_gguf_config(file)


def test_a_file_without_key_value_heads_has_as_many_as_query_heads(tmp_path: Path) -> None:
    builder = model_builder(ModelSizes("openelm"), changes={"openelm.attention.head_count_kv": None})
    with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
        assert [sizes[:2] for sizes in read_gguf_config(file).layer_sizes] == [(4, 4), (8, 8)]
