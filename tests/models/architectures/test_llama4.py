"""Llama 4's text model as a folder and as GGUF: the logits of `transformers`, layers of each kind, refusals by name."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.errors import EngineError
from quengine.kernels.reference import ReferenceBackend
from quengine.models.decoder import Decoder
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.hf.config_hf import read_hf_config
from tests.gguf_builder import ModelSizes, model_builder
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.llama_cpp_logits import LlamaCpp
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened, path_of
from tests.transformers_models import nmse, token_ids, transformers_model, write_model

SIZES = {
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "intermediate_size_mlp": 96,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL = 4 * ["full_attention"]


def _clear(model: Any) -> None:
    """Routers that are decided: a cache in fp16 tips none."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("router.weight"):
                weight.mul_(4.0)
            elif "experts." in name:  # made as zeros, or not at all
                weight.copy_(0.12 * torch.randn_like(weight))


def _case(converts: bool = True, **config: Any) -> Case:
    return Case("llama4_text", {**SIZES, **config}, converts=converts, change=_clear)


CASES = {
    "plain": _case(),
    "some dense, llama3": _case(interleave_moe_layer_step=2, rope_parameters=LLAMA3),
    "queries grow": _case(False, floor_scale=8, attn_scale=0.5, no_rope_layer_interval=2),
    "no norms, own layers": _case(
        False, use_qk_norm=False, no_rope_layers=[1, 0, 1, 1], moe_layers=[0, 2], attention_chunk_size=128
    ),
    # With one expert: no rounding tips the choice of experts.
    "chunks": _case(
        False,
        attention_chunk_size=32,
        floor_scale=8,
        attn_scale=0.5,
        intermediate_size=64,
        num_local_experts=1,
    ),
    "chunks of rotated and other layers": _case(
        False, attention_chunk_size=32, layer_types=["full_attention", *3 * ["chunked_attention"]]
    ),
    "no chunks": _case(False, layer_types=FULL, attn_temperature_tuning=False, attention_chunk_size=4),
}


class TestLogits(SameLogits):
    pass


def test_both_files_describe_the_same_model(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "some dense, llama3", kind).config
        assert config.unrotated_layers == (3,) and config.layer_windows == (8192, 8192, 8192, None)
        assert config.experts is not None and config.experts.dense_layers == (0, 2)
        assert config.experts.shared_feed_forward_length == 48 and config.experts.router.weighs_inputs
        assert config.attention_chunk == 8192 and config.block.attention.unit_norms
        assert config.attention_temperature_scale == 0.1 and config.attention_temperature_offset == 1
    own = opened(root, "no norms, own layers", "folder").config
    assert own.unrotated_layers == (1,) and not own.block.attention.unit_norms and own.attention_chunk == 128
    mixed = opened(root, "chunks of rotated and other layers", "folder").config
    assert mixed.layer_windows == (None, 32, 32, 32) and mixed.unrotated_layers == (3,)
    assert opened(root, "no chunks", "folder").config.attention_chunk == 0


def _choices_of_transformers(root: Path, prompt: list[int], answer: list[int], ends: list[int]) -> bool:
    """Whether each token of an answer is the likeliest one but `ends`, or as good as that, after those before it."""
    model, _ = transformers_model(path_of(root, "chunks", "folder"))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    logits[:, ends] = -torch.inf
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((logits.max(1).values - chosen < 0.02).all())


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_texts_beyond_a_chunk_are_those_of_transformers(root: Path, backend: str) -> None:
    """Prompts and answers that cross the ends of chunks at 32, 64 and 96, in one batch and again from the cache."""
    path, long = path_of(root, "chunks", "folder"), token_ids(VOCAB).tolist()
    prompts = [long[:30], [*long, *long[:38]], long[3:20]]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(
        path, device="cpu", threads=1, ctx_size=128, chunk_size=16, parallel=3, reuse_prefix=True,
        backend=backend,
    ) as llm:  # fmt: skip
        answers = [llm.generate(prompts, params) for _ in range(2)]
        ends = list(llm.tokenizer.eos_ids)
    assert answers[1][1].timings.cached_tokens >= 64
    for prompt, *found in zip(prompts, *answers, strict=True):
        assert all(len(each.tokens) == 40 for each in found)
        assert all(_choices_of_transformers(root, prompt, each.tokens, ends) for each in found)


@pytest.mark.parametrize("decode", [False, True])
def test_logits_beyond_a_chunk_are_those_of_transformers(root: Path, decode: bool) -> None:
    path, long = path_of(root, "chunks", "folder"), token_ids(VOCAB).tolist()
    ids = [*long, *long[:38], *long[5:37]]
    model, _ = transformers_model(path)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    with LLM(path, device="cpu", threads=1, ctx_size=128, chunk_size=48) as llm:
        found = llm.logits(ids, decode=decode)
    assert nmse(found.double(), expected) < 5e-6


def test_a_file_beyond_its_chunk_is_computed_as_llama_cpp_does(tmp_path: Path) -> None:
    """Files say nothing of chunks: both take 8,192 positions for granted. In steps of few rows llama.cpp
    rounds more."""
    folder, path = tmp_path / "model", tmp_path / "model.gguf"
    sizes = {**SIZES, "max_position_embeddings": 16384}
    write_model(folder, "llama4_text", vocab=VOCAB, change=_clear, **sizes)
    write_tokenizer(folder)
    convert([Conversion(folder, path, "llama-bpe")])
    ids = torch.randint(0, 250, (8192 + 256,), generator=torch.Generator().manual_seed(3)).tolist()
    with LLM(path, device="cpu", threads=1, ctx_size=8512) as llm:
        found = llm.logits(ids)[8150:].double()
    with LlamaCpp(path, VOCAB, context=8704) as model:
        expected = [model.step(ids[start : start + 512]) for start in range(0, len(ids), 512)]
    assert nmse(found, torch.from_numpy(np.concatenate(expected)[8150:]).double()) < 1e-6


def test_chunks_that_are_no_whole_blocks_are_refused_by_name(root: Path) -> None:
    config = json.loads((path_of(root, "chunks", "folder") / "config.json").read_text())
    odd = read_hf_config({**config, "attention_chunk_size": 40})
    assert odd.context_length == 40
    with pytest.raises(
        EngineError, match="a chunk of this llama4 model's attention, 40, and chunks are only"
    ):
        Decoder(odd, opened(root, "chunks", "folder").tensors, ReferenceBackend(True), 64, 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok: 2 experts for each row whose input they weigh"),
        (
            {"layer_types": ["sliding_attention", *FULL[1:]]},
            "layer_types: sliding_attention: not implemented",
        ),
        ({"moe_layers": "all"}, "moe_layers: is not a list of layers"),
        ({"no_rope_layers": [1, 2, 1, 1]}, "no_rope_layers: is not a 0 or 1 for each of 4 layers"),
        ({"attention_bias": True}, "attention_bias: biases on the output"),
        ({"attention_chunk_size": None}, "attention_chunk_size"),
    ],
)
def test_what_is_not_computed_in_a_folder_is_refused(
    root: Path, change: dict[str, Any], problem: str
) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    with pytest.raises(EngineError, match=problem):
        read_hf_config({**config, **change})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"attention.sliding_window": 0}, "sliding_window .*: 0: only chunks of 8192 positions"),
        ({"attention.sliding_window_pattern": 2}, "does not implement"),
        ({"expert_used_count": 2}, "2 experts for each row"),
    ],
)
def test_what_is_not_computed_in_a_file_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    changes = {f"llama4.{key}": value for key, value in change.items()}
    path = model_builder(ModelSizes("llama4"), changes=changes).write(tmp_path / "m.gguf")
    with open_gguf(path) as file, pytest.raises(GGUFError, match=problem):
        read_gguf_config(file)


def test_a_model_of_128_experts_has_no_norms_of_queries_and_keys(tmp_path: Path) -> None:
    path = model_builder(ModelSizes("llama4", blocks=1, experts=128)).write(tmp_path / "m.gguf")
    with open_gguf(path) as file:
        assert not read_gguf_config(file).block.attention.unit_norms


@pytest.mark.gpu
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_gpu_computes_chunks(root: Path, parallel: int) -> None:
    """Prompts in pieces and captured decode steps, against the definition of the same engine."""
    path, long = path_of(root, "chunks", "folder"), token_ids(VOCAB).tolist()
    prompts = [[*long, *long[:38]], long[:30], long[3:20]][: max(1, parallel - 1)]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(path, device="cuda", ctx_size=128, chunk_size=48, parallel=parallel) as llm:
        ids, ends = [*prompts[0], *long[5:37]], list(llm.tokenizer.eos_ids)
        found = [llm.logits(ids, decode=decode).double().cpu() for decode in (False, True)]
        answers = llm.generate(prompts, params)
    with LLM(path, device="cpu", backend="reference", ctx_size=128) as llm:
        expected = llm.logits(ids).double()
    assert max(nmse(each, expected) for each in found) < 5e-5
    for prompt, answer in zip(prompts, answers, strict=True):
        assert _choices_of_transformers(root, prompt, answer.tokens, ends)
