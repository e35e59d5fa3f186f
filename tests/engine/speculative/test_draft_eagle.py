"""Drafts by EAGLE-3 draft models: texts as without drafts, and drafts that are those of the paper's definition."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quengine import LLM, EngineError
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.memory import FUSED_BYTES, CacheNeeds
from quengine.models.checkpoint import open_checkpoint
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.models.synthetic.synthetic_eagle import write_synthetic_eagle
from quengine.request.sequence import Sequence
from quengine.speculative.draft_eagle import EagleDrafts
from quengine.structured.constraint_spec import ConstraintSpec
from tests.eagle_files import HEAD_DIM, HEADS, KV_HEADS, WIDTH, Definition, Eagle
from tests.engine import test_steps_ahead as ahead
from tests.engine.speculative.draft_device import drafts_on_device
from tests.engine.speculative.test_draft_mtp import SIZES, Watched
from tests.engine.speculative.test_speculation import (
    GREEDY,
    PENALIZED,
    PROMPTS,
    SEEDED,
    all_free,
    counts,
    limit_blocks,
    load,
    same,
)
from tests.llama_cpp_convert import VOCAB, write_tokenizer
from tests.models.test_eagle import inputs_of
from tests.transformers_models import write_model

CONTEXT = 192
KIND = Eagle(layers=(1, 2, 3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_pair(tmp_path_factory.mktemp("eagle"))


def write_pair(found: Path) -> Path:
    """`target` and its `draft`."""
    sizes = {"num_hidden_layers": 4, "max_position_embeddings": CONTEXT}
    write_tokenizer(write_model(found / "target", "llama", vocab=VOCAB, **sizes))
    KIND.write(found / "draft")
    return found


def write_agreeing(folder: Path) -> Path:
    """`target`, whose next token follows from the newest alone, and `draft`, which says the same."""
    found = folder / "agreeing"
    target = found / "target"
    draft = Eagle(drafted=VOCAB, layers=(1, 2, 3), normed_residual=True).write(found / "draft")
    shutil.copytree(folder / "target", target)
    held, own = (load_file(path / "model.safetensors") for path in (target, draft))
    values = KV_HEADS * HEAD_DIM  # the newest token's embedding passes through them
    for name, tensor in held.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    held["model.embed_tokens.weight"][:, values:] = 0
    to_keys = 6 * torch.randn(values, values, generator=torch.Generator().manual_seed(1)) * values**-0.5
    for name, tensor in own.items():
        if "proj" in name or name.endswith("hidden_norm.weight"):
            tensor.zero_()
        if name.endswith("input_layernorm.weight"):
            tensor.fill_(1.0)
        if name.endswith("v_proj.weight"):
            tensor[:, :values] = torch.eye(values)
        if name.endswith("k_proj.weight"):
            tensor[:, :values] = to_keys
        if name.endswith("q_proj.weight"):  # each head sees its own token alone
            shared = to_keys.view(KV_HEADS, HEAD_DIM, values).repeat_interleave(HEADS // KV_HEADS, 0)
            tensor[:, :values] = shared.reshape(HEADS * HEAD_DIM, values)
        if name.endswith("o_proj.weight"):
            for head in range(KV_HEADS):
                first = head * HEADS // KV_HEADS * HEAD_DIM
                place = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
                tensor[place, first : first + HEAD_DIM] = torch.eye(HEAD_DIM)
    own |= {"norm.weight": held["model.norm.weight"], "lm_head.weight": held["lm_head.weight"]}
    for path, tensors in ((target, held), (draft, own)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return found


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[LLM]:
    with load(folder / "target", ctx_size=CONTEXT) as llm:
        yield llm


def test_texts_are_those_without_drafts(folder: Path, alone: LLM) -> None:
    grammar = replace(SEEDED, constraint=ConstraintSpec.regex("((ab|cd){3}e){20}"), logprobs=2)
    every = [GREEDY, SEEDED, PENALIZED, grammar]
    expected = [alone.generate(PROMPTS, params) for params in every]
    for parallel in (1, 4):
        options = {"ctx_size": CONTEXT, "parallel": parallel, "chunk_size": 24, "reuse_prefix": True}
        with load(folder / "target", **options, draft_model=folder / "draft", draft_tokens=3) as llm:
            assert any("EAGLE-3, of the inputs of layers 1, 2, 3" in note for note in llm.loaded.notes)
            for params, texts in zip(every, expected, strict=True):
                got = llm.generate(PROMPTS, params)
                same(got, texts)
                assert [c.logprobs for c in got] == [c.logprobs for c in texts]
                assert counts(got)[0] > 0 and all_free(llm)


def test_texts_stay_where_sequences_are_preempted(
    folder: Path, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [list(range(10 * i, 10 * i + 12 + 3 * i)) for i in range(5)]
    params = replace(SEEDED, max_tokens=70)
    expected = alone.generate(prompts, params)
    with load(
        folder / "target", ctx_size=CONTEXT, parallel=5, draft_model=folder / "draft", chunk_size=24
    ) as llm:
        preempted: list[Sequence] = []
        limit_blocks(llm, 6)
        preempt = llm.scheduler._preempt
        monkeypatch.setattr(
            llm.scheduler, "_preempt", lambda each, **how: (preempted.append(each), preempt(each, **how))
        )
        same(llm.generate(prompts, params), expected)
        assert preempted and all_free(llm)


def test_drafts_are_those_of_the_definition(folder: Path) -> None:
    """In chunks, in batches, after prefixes that are shared, accepted and rejected drafts: as if computed at once."""
    params = replace(GREEDY, max_tokens=12)
    options = {"ctx_size": CONTEXT, "parallel": 2, "chunk_size": 24, "reuse_prefix": True}
    with load(
        folder / "target", **options, backend="reference", draft_model=folder / "draft", draft_tokens=2
    ) as llm:
        drafts = llm.loaded.draft
        assert isinstance(drafts, EagleDrafts)
        watched = Watched(drafts)
        first = llm.generate(PROMPTS[0], params)[0]
        for prompt in ([*PROMPTS[0], *first.tokens, 9], PROMPTS[4], PROMPTS[2]):
            llm.generate([prompt, PROMPTS[3]], params)
    made = [each for each in watched.made if each[1]]
    assert len(made) > 12 and any(len(draft) == 2 for _, draft in made)
    assert all(len(ids) > 1 for ids, _ in made), "no row precedes the first token"
    for ids, draft in made[:: len(made) // 8]:
        given, embedding = inputs_of(folder / "target", KIND.layers, torch.tensor(ids[:-1]))
        definition = Definition(folder / "draft", embedding)
        assert list(draft) == definition.draft(ids, definition.fused(given), len(draft))


@pytest.fixture(scope="module")
def agreeing(folder: Path) -> Path:
    return write_agreeing(folder)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_draft_model_that_is_right_is_accepted(agreeing: Path, parallel: int) -> None:
    with load(agreeing / "target", ctx_size=CONTEXT) as plain:
        expected = [plain.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
    options = {"ctx_size": CONTEXT, "parallel": parallel, "draft_tokens": 4}
    with load(agreeing / "target", **options, draft_model=agreeing / "draft") as llm:
        for params, texts in zip((GREEDY, SEEDED), expected, strict=True):
            got = llm.generate(PROMPTS, params)
            same(got, texts)
            drafted, accepted = counts(got)
            assert accepted > 0.7 * drafted and drafted > 100, (drafted, accepted)


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_device_drafts_and_accepts_as_the_host_does(folder: Path, agreeing: Path, parallel: int) -> None:
    """By a draft model that is right, and by one that is not; sequences shorter than what the device computes of them
    have their first drafts of the host."""
    for pair in (folder, agreeing):
        with ahead.load(pair / "target", 1, ctx_size=CONTEXT) as plain:
            expected = [plain.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
        options = {"ctx_size": CONTEXT, "draft_model": pair / "draft", "draft_tokens": 3}
        with ahead.load(pair / "target", parallel, **options) as llm:
            device, drafting = drafts_on_device(llm, 3)
            got = [llm.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
            for ours, texts in zip(got, expected, strict=True):
                same(ours, texts)
                drafted, accepted = counts(ours)
                assert drafted > 0 and (pair is folder or accepted > 0.7 * drafted), (drafted, accepted)
            assert drafting.drafted and all_free(llm)
            assert any(entry.startswith("drafts") for entry in device.log)


SMALL = {"vocab_size": 500, "context_length": CONTEXT, "embedding_length": 64, "quant": "F32"}
SMALL |= {"head_count": 2, "head_count_kv": 1, "head_dim": 32}
OTHERS = {
    "qwen3moe-tiny": {**SMALL, "expert_feed_forward_length": 32, "experts": 6},
    "gemma-4-e-tiny": {"context_length": CONTEXT},
    "gpt-oss-tiny": {**SMALL, "expert_feed_forward_length": 32, "experts": 6},
    "qwen3.5-tiny": {**SIZES, "draft_layers": 0},
}


@pytest.mark.parametrize("preset", OTHERS)
def test_texts_of_other_architectures_are_those_without_drafts(tmp_path: Path, preset: str) -> None:
    """Experts, layers that use the keys of earlier ones, windows, and states, which drafts roll back."""
    path = write_synthetic(tmp_path / "target.gguf", replace(PRESETS[preset], **OTHERS[preset]))  # type: ignore[arg-type]
    draft = write_synthetic_eagle(tmp_path / "draft.gguf", open_checkpoint(path).config, drafted=250)
    params = replace(SEEDED, max_tokens=24)
    with load(path, ctx_size=CONTEXT) as plain:
        expected = plain.generate(PROMPTS, params)
    options = {"ctx_size": CONTEXT, "parallel": 3, "chunk_size": 24}
    with load(path, **options, draft_model=draft, draft_tokens=2) as llm:
        got = llm.generate(PROMPTS, params)
        same(got, expected)
        assert counts(got)[0] > 0 and all_free(llm)


def test_memory_counts_the_layer_and_the_rows_that_it_reads(folder: Path) -> None:
    with load(folder / "target", ctx_size=CONTEXT, draft_model=folder / "draft") as llm:
        assert llm.loaded.draft is not None and llm.loaded.draft_checkpoint is not None
        config, draft = llm.model_config, llm.loaded.draft_checkpoint
        with_draft, without = (CacheNeeds(config, 64, of).block_bytes("f16") for of in (draft.config, None))
        heads = 2 * 2 * KV_HEADS * HEAD_DIM
        assert with_draft[0] - without[0] == BLOCK_SIZE * (heads + FUSED_BYTES * WIDTH)
        blocks = llm.loaded.cache.pools[0].num_blocks + 1
        assert llm.loaded.draft.cache_bytes == blocks * BLOCK_SIZE * heads
        hidden = llm.loaded.cache.hidden
        assert hidden is not None and hidden.nbytes == blocks * BLOCK_SIZE * FUSED_BYTES * WIDTH


def test_devices_that_share_a_model_have_no_such_drafts(folder: Path) -> None:
    with pytest.raises(EngineError, match=r"draft model draft \(llama\): not implemented .* 2 devices share"):
        load(folder / "target", draft_model=folder / "draft", tensor_parallel=2)
