"""LFM2 as a folder and as GGUF: the logits of `transformers`, states in the engine, and refusals by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quengine import LLM
from quengine.context.prefix_file import PrefixFiles
from quengine.context.saved_prefix import restore_prefix, save_prefix
from quengine.errors import EngineError
from quengine.models.architectures import layers_of
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.config import CacheGroup
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.output import Completion
from quengine.request.sampling_params import SamplingParams
from tests.models.architectures.both_files import KINDS, Case, SameLogits, opened
from tests.transformers_models import DROP, edit, nmse

LAYERS = ["conv", "full_attention", "conv", "conv", "full_attention"]
SIZES = {"num_hidden_layers": 5, "layer_types": LAYERS, "block_auto_adjust_ff_dim": False}

MOE = {
    **{key: SIZES[key] for key in ("num_hidden_layers", "layer_types")},
    "num_dense_layers": 1,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def as_released(folder: Path) -> None:
    """With the keys of the first release: indices of layers, and other names."""
    edit(folder, layer_types=DROP, full_attn_idxs=[1, 4], tie_embedding=True, block_ff_dim=96)


CASES = {
    "plain": Case("lfm2", SIZES),
    "four taps": Case("lfm2", {**SIZES, "conv_L_cache": 4}),
    "adjusted length": Case(
        "lfm2", {**SIZES, "block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "intermediate_size": 160}
    ),
    "as released": Case("lfm2", SIZES, edit=as_released, converts=False),
    "experts": Case("lfm2_moe", MOE, mixture=True),
    "experts without a bias": Case("lfm2_moe", {**MOE, "use_expert_bias": False}, mixture=True),
    "experts, not normalized": Case(
        "lfm2_moe", {**MOE, "norm_topk_prob": False, "routed_scaling_factor": 1.5}, converts=False
    ),
    "convolution last": Case("lfm2", {**SIZES, "layer_types": [*LAYERS[1:], "conv"]}),
}


class TestLogits(SameLogits):
    main = ("plain", "convolution last", "experts")


def test_layers_are_declared_one_by_one(root: Path) -> None:
    for kind in KINDS:
        config = opened(root, "plain", kind).config
        assert config.cache_groups == (CacheGroup(None, (1, 4)), CacheGroup(None, (0, 2, 3), is_state=True))
        mixers = [block.mixer for block in layers_of(config)]
        assert [isinstance(mixer, ShortConv) for mixer in mixers] == [kind == "conv" for kind in LAYERS]
        assert set(mixers[0].tensors()) == {
            "attn_norm.weight",
            "shortconv.in_proj.weight",
            "shortconv.conv.weight",
            "shortconv.out_proj.weight",
        }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"conv_bias": True}, "conv_bias: biases of convolutions are not implemented"),
        ({"layer_types": ["conv"] * 4}, "layer_types: is not a list of the kinds of 5 layers"),
        ({"layer_types": [*LAYERS[:4], "mamba"]}, "layer_types: mamba: not implemented"),
        ({"layer_types": DROP, "full_attn_idxs": [5]}, "full_attn_idxs: is not a list of layers of 5"),
        ({"conv_L_cache": 40}, "conv_L_cache: 40 is not from 1 to 16"),
        ({"layer_types": ["conv"] * 5}, "layer_types: no layer has attention"),
    ],
)
def test_what_is_not_computed_is_refused(root: Path, changes: dict[str, Any], message: str) -> None:
    config = json.loads((root / "plain" / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not DROP}
    with pytest.raises(EngineError, match=message):
        read_hf_config(config)


PROMPTS = [
    [(7 * i + 3 * n) % 250 for i in range(length)] for n, length in enumerate((40, 1, 130, 97, 33, 64))
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("lfm2") / "tiny.gguf", "lfm2-tiny")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(tiny: Path, where: str) -> list[Completion]:
    """Each prompt by itself, in an engine that reuses nothing."""
    with LLM(tiny, where, ctx_size=256, deterministic=True, reuse_prefix=False) as llm:
        return [llm.generate(prompt, PARAMS)[0] for prompt in PROMPTS]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [each.tokens for each in completions]


@pytest.mark.parametrize("chunk_size", [16, 48, 512])
def test_batches_and_chunks_leave_every_state_alone(
    tiny: Path, where: str, alone: list[Completion], chunk_size: int
) -> None:
    options = {"deterministic": True, "parallel": 4, "chunk_size": chunk_size}
    with LLM(tiny, where, ctx_size=256, **options) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS)) == tokens(alone)
        assert llm.scheduler.blocks.num_used == 0


def test_a_prompt_that_begins_as_another_goes_on_from_its_checkpoint(
    tiny: Path, where: str, alone: list[Completion]
) -> None:
    with LLM(tiny, where, ctx_size=256, deterministic=True, reuse_prefix=True) as llm:
        first = llm.generate(PROMPTS[2], PARAMS)[0]
        again = llm.generate(PROMPTS[2], PARAMS)[0]
        longer = llm.generate([*PROMPTS[2], 5, 6, 7], PARAMS)[0]
        other = llm.generate([*PROMPTS[2][:70], 9], PARAMS)[0]
    assert (first.timings.cached_tokens, again.timings.cached_tokens) == (0, 128)
    assert longer.timings.cached_tokens == 128 and other.timings.cached_tokens == 0  # no checkpoint at 64
    assert first.tokens == again.tokens == alone[2].tokens
    with LLM(tiny, where, ctx_size=256, deterministic=True, reuse_prefix=False) as llm:
        assert longer.tokens == llm.generate([*PROMPTS[2], 5, 6, 7], PARAMS)[0].tokens


def test_a_conversation_goes_on_from_the_end_of_its_answer(tiny: Path, where: str) -> None:
    with LLM(tiny, where, ctx_size=256, reuse_prefix=True) as llm:
        first = llm.generate(PROMPTS[0], PARAMS)[0]
        second = [*PROMPTS[0], *first.tokens, 5, 6, 7]
        answer = llm.generate(second, PARAMS)[0]
    assert answer.timings.cached_tokens == 64, "of 40 tokens of the prompt and 39 of the answer"
    with LLM(tiny, where, ctx_size=256, reuse_prefix=False) as llm:
        llm.generate(PROMPTS[0], PARAMS)
        logits = llm.logits(second)
    assert answer.tokens[0] == int(logits[-1].argmax())


def test_a_saved_prefix_has_the_state_at_its_end(tiny: Path, where: str, tmp_path: Path) -> None:
    options = {"ctx_size": 256, "reuse_prefix": True, "deterministic": True}
    with LLM(tiny, where, **options) as llm:
        first = llm.generate(PROMPTS[2], PARAMS)[0]
        files = PrefixFiles(llm.loaded, "f16", True)
        files.write(tmp_path / "saved", save_prefix(llm.scheduler, llm.model_config, PROMPTS[2]))
    with LLM(tiny, where, **options) as llm:
        saved, _ = PrefixFiles(llm.loaded, "f16", True).read(tmp_path / "saved")
        restore_prefix(llm.scheduler, llm.model_config, saved)
        again = llm.generate(PROMPTS[2], PARAMS)[0]
    assert (again.timings.cached_tokens, again.tokens) == (128, first.tokens)


def test_checkpoints_make_room_for_newer_ones(tiny: Path, where: str) -> None:
    options = {"deterministic": True, "reuse_prefix": True, "state_checkpoints": 3}
    with LLM(tiny, where, ctx_size=256, **options) as llm:
        prompts = [[n, *PROMPTS[2]] for n in range(5)]
        short = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for prompt in prompts:
            llm.generate(prompt, short)
        cached = [
            llm.generate(prompt, short)[0].timings.cached_tokens for prompt in (prompts[-1], prompts[0])
        ]
        assert cached == [128, 0]


def test_preempted_sequences_get_their_tokens(tiny: Path, where: str) -> None:
    prompts = [[(3 * i + n) % 250 for i in range(33)] for n in range(4)]
    params = replace(PARAMS, max_tokens=90)
    with LLM(tiny, where, ctx_size=256, deterministic=True, reuse_prefix=False) as llm:
        expected = [llm.generate(prompt, params)[0] for prompt in prompts]
    with LLM(tiny, where, ctx_size=256, deterministic=True, parallel=4) as llm:
        paged, state = llm.loaded.cache.pools
        llm.loaded.cache.pools = (replace(paged, num_blocks=8), state)
        llm.scheduler = llm._make_scheduler()
        preempted, preempt = [], llm.scheduler._preempt
        llm.scheduler._preempt = lambda sequence: (preempted.append(sequence), preempt(sequence))[1]
        assert tokens(llm.generate(prompts, params)) == tokens(expected)
        assert preempted


def test_drafts_that_are_not_accepted_leave_the_state_as_it_was(
    tiny: Path, where: str, alone: list[Completion]
) -> None:
    with LLM(tiny, where, ctx_size=256, parallel=3, deterministic=True, draft_ngram=2, draft_tokens=7) as llm:
        # Tokens that come again, so that the look-up has drafts, few of which are right.
        repeated = [[1, 2, 3, 4] * 12, *PROMPTS]
        found = llm.generate(repeated, PARAMS)
    with LLM(tiny, where, ctx_size=256, deterministic=True, reuse_prefix=False) as llm:
        plain = llm.generate(repeated[0], PARAMS)[0]
    assert found[0].timings.drafts and found[0].tokens == plain.tokens
    assert tokens(found[1:]) == tokens(alone)


@pytest.mark.parametrize("options", [{"tensor_parallel": 2}, {"tensor_parallel": 2, "split": "layer"}])
def test_ranks_keep_their_part_of_the_state(tiny: Path, options: dict[str, Any]) -> None:
    with LLM(tiny, "cpu", ctx_size=256, deterministic=True, parallel=2, **options) as llm:
        logits = llm.logits(PROMPTS[2])
        found = llm.generate([PROMPTS[2], PROMPTS[0]], PARAMS)
        again = llm.generate(PROMPTS[2], PARAMS)[0]
    with LLM(tiny, "cpu", ctx_size=256, deterministic=True) as llm:
        whole = llm.logits(PROMPTS[2])
        alone = llm.generate([PROMPTS[2], PROMPTS[0]], PARAMS)
    assert tokens(found) == tokens(alone)
    assert again.timings.cached_tokens == 128 and again.tokens == alone[0].tokens
    assert nmse(logits, whole) < 1e-5


def test_it_cannot_draft(tiny: Path) -> None:
    with pytest.raises(EngineError, match=r"tiny.gguf \(lfm2\) keeps a state"):
        LLM(tiny, "cpu", ctx_size=256, draft_model=tiny)
