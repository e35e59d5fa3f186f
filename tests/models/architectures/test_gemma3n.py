"""Gemma 3n as a folder and as GGUF: the logits of `transformers`, of several rows a token and sparse activations."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quengine import EngineError, SamplingParams
from quengine.kernels import altup
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.layer_split import layer_bytes
from tests.engine.speculative.test_speculation import load
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import VOCAB
from tests.llama_cpp_logits import llama_cpp_logits
from tests.models.architectures.both_files import Case, SameLogits, opened
from tests.transformers_models import nmse, our_logits

SIZES = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 5,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB,
    "laurel_rank": 16,
    "activation_sparsity_pattern": [0.8, 0.3, 0.0, 0.5, 0.0, 0.0],
    "final_logit_softcapping": 3.0,
}


def scales(model: Any) -> None:
    """Other numbers than the ones that models are made with."""
    for name, tensor in model.named_parameters():
        if name.endswith("correct_output_scale"):
            tensor.uniform_(0.5, 1.5)
        if name.endswith(("prediction_coefs.weight", "correction_coefs.weight")):
            tensor.normal_(std=0.2)
        if name.endswith("modality_router.weight"):  # whose input is divided by the width
            tensor.mul_(len(tensor[0]) / 2)
        if name.endswith(
            "q_norm.weight"
        ):  # scores of one size, as in trained models: nothing else scales them
            tensor.mul_(len(tensor) ** -0.5)


CASES = {
    "plain": Case("gemma3n_text", SIZES, change=scales),
    "dense": Case(
        "gemma3n_text",
        {
            **SIZES,
            "num_kv_shared_layers": 0,
            "activation_sparsity_pattern": [0.0] * 6,
            "intermediate_size": [96, 64, 96, 64, 96, 64],
        },
        change=scales,
    ),
    "fewer rows": Case(
        "gemma3n_text",
        {**SIZES, "vocab_size_per_layer_input": VOCAB - 40, "altup_num_inputs": 3},
        change=scales,
        converts=False,
    ),
    "as llama.cpp": Case(
        "gemma3n_text",
        {
            **SIZES,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 256,
            "laurel_rank": 64,
            "intermediate_size": 768,
            "activation_sparsity_pattern": [0.95] * 6,
            "final_logit_softcapping": 30.0,
        },
        change=scales,
    ),
}


class TestLogits(SameLogits):
    main = ("plain",)


def test_llama_cpp_computes_the_same(root: Path) -> None:
    """Of the sizes, cutoffs and sharing layers that it takes for granted; its deviation is that of a sample."""
    theirs = llama_cpp_logits(root / "as llama.cpp.gguf", VOCAB)
    assert theirs is not None
    rows = zip(
        our_logits(opened(root, "as llama.cpp", "gguf"), VOCAB),
        torch.from_numpy(theirs).double(),
        strict=True,
    )
    assert torch.tensor([nmse(*row) for row in rows]).median() < 1e-3


def test_the_same_text_in_any_batch(root: Path) -> None:
    """In chunks, several sequences at once, after prefixes that are shared: as each alone."""
    prompts = [list(range(5, 75)), [3, 1, 4, 1, 5, 9], [7], [*range(5, 69), 200]]
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True)
    with load(root / "plain.gguf") as llm:
        expected = [llm.generate(prompt, params)[0].tokens for prompt in prompts]
    with load(root / "plain.gguf", parallel=3, chunk_size=24, reuse_prefix=True, draft_ngram=2) as llm:
        for _ in range(2):
            assert [each.tokens for each in llm.generate(prompts, params)] == expected


def test_a_row_has_the_bits_that_it_has_alone() -> None:
    torch.manual_seed(0)
    streams, router = torch.randn(9, 4, 96), torch.randn(4, 96)
    predict, correct = torch.randn(16, 4), torch.randn(4, 4)

    def computed(rows: torch.Tensor) -> torch.Tensor:
        found = altup.modalities(rows[:, 0], router)
        predictions = altup.predict(rows, found, predict)
        sparse = altup.above_cutoff(rows[:, 1], 1.2)
        return altup.of_size(altup.correct(predictions, sparse, found, correct), rows)

    alone = [computed(streams[row : row + 1]) for row in range(9)]
    assert torch.equal(torch.cat(alone), computed(streams))


TEXT = {
    "model_type": "gemma3n_text",
    "num_hidden_layers": 30,
    "intermediate_size": 8192,
    "num_kv_shared_layers": 10,
}


def config_of(**changes: Any) -> ModelConfig:
    return read_hf_config({"model_type": "gemma3n", "text_config": TEXT | changes})


def test_a_released_folder_leaves_much_to_defaults() -> None:
    config = config_of(intermediate_size=[8192] * 30)
    assert config.full_attention_layers == (4, 9, 14, 19, 24, 29) and config.sliding_window == 512
    assert (config.attention_scale, config.logit_softcap, config.tied_output) == (1.0, 30.0, True)
    assert config.layer_input is not None and config.layer_input.rows == 262144
    assert config.altup is not None and config.altup.streams == 4 and config.altup.rank == 64
    assert config.altup.cutoffs == (pytest.approx(1.6448536, abs=1e-6),) * 10 + (-float("inf"),) * 20
    assert [config.kv_source(i) for i in (19, 20, 24, 29)] == [19, 18, 19, 19]
    assert not config.layer_sizes


@pytest.mark.parametrize(
    "changes",
    [
        {"altup_active_idx": 1},
        {"altup_correct_scale": False},
        {"altup_num_inputs": 1},
        {"laurel_rank": 0},
        {"activation_sparsity_pattern": [0.5]},
        {"activation_sparsity_pattern": [1.0] * 30},
        {"activation_sparsity_pattern": ["a"] * 30},
        {"intermediate_size": [8192]},
        {"num_kv_shared_layers": 30},
        {"vocab_size_per_layer_input": 262401},
        {"hidden_size_per_layer_input": 0},
        {"final_logit_softcapping": -1.0},
        {"sliding_window": None},
        {"attention_bias": True},
        {"hidden_activation": "silu"},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}},
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
        ("altup.active_idx", 1),
        ("altup.num_inputs", 1),
        ("activation_sparsity_scale", [0.5]),
        ("activation_sparsity_scale", [float("nan")] * 2),
        ("activation_sparsity_scale", None),
        ("embedding_length_per_layer_input", 0),
        ("attention.shared_kv_layers", 2),
        ("final_logit_softcapping", -1.0),
    ],
    ids=str,
)
def test_bad_metadata_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    path = model_builder(ModelSizes("gemma3n"), tied=True, changes={f"gemma3n.{key}": value})
    with open_gguf(path.write(tmp_path / "m.gguf")) as file, pytest.raises(GGUFError) as caught:
        read_gguf_config(file)
    assert caught.value.field == f"gemma3n.{key}"


def test_devices_do_not_share_such_layers(root: Path) -> None:
    with pytest.raises(EngineError, match="not implemented for layers with alternating updates"):
        load(root / "plain.gguf", tensor_parallel=2)
    checkpoint = opened(root, "plain", "gguf")
    with pytest.raises(EngineError, match="are not shared out; use one device"):
        layer_bytes(checkpoint.config, checkpoint.tensors)
