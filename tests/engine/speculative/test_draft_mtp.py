"""Drafts by a model's own layer: texts as without drafts, and drafts that the layer makes of the target's rows."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quengine import EngineError
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE
from quengine.kv_cache import KVCache
from quengine.memory import CacheNeeds
from quengine.models.decoder import Decoder
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.draft_decoder import DraftDecoder
from quengine.models.gguf import StringArray, open_gguf
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.request.sequence import Sequence
from quengine.speculative.draft_mtp import MtpDrafts
from quengine.step_plan import SequenceRows
from quengine.structured.constraint_spec import ConstraintSpec
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
from tests.gguf_builder import GGUFBuilder

SIZES = {
    "vocab_size": 500,
    "context_length": 192,
    "embedding_length": 64,
    "feed_forward_length": 128,
    "head_count": 2,
    "head_count_kv": 1,
    "head_dim": 32,
    "delta_head_dim": 32,
    "key_heads": 1,
    "value_heads": 2,
    "quant": "F32",
}


TABLES = [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_synthetic(folder / "model.gguf", replace(PRESETS["qwen3.5-mtp-tiny"], **SIZES))  # type: ignore[arg-type]


def certain_file(model: Path, path: Path) -> Path:
    """Of a model in F32 one whose next token follows from the newest alone, and whose own layer has the same logits."""
    with open_gguf(model) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        norm = file.tensors["output_norm.weight"]
        for name, tensor in file.tensors.items():
            values = torch.from_numpy(tensor.data.copy()).view(torch.float32).view(tensor.shape)
            if name.endswith(("attn_output.weight", "ssm_out.weight", "ffn_down.weight")):
                values.zero_()
            if name.endswith("enorm.weight"):
                values.fill_(1.0)
            if name.endswith("eh_proj.weight"):
                values.copy_(torch.eye(len(values), values.shape[1]))
            data = values.numpy().view("u1")
            if name.endswith("shared_head_norm.weight"):
                data = norm.data.copy()
            builder.tensor(name, tensor.shape, tensor.type_name, data)
        return builder.write(path)


@pytest.fixture(scope="module")
def certain(folder: Path, model: Path) -> Path:
    return certain_file(model, folder / "certain.gguf")


def test_texts_are_those_without_drafts(model: Path) -> None:
    grammar = replace(SEEDED, constraint=ConstraintSpec.regex("((ab|cd){3}e){20}"), logprobs=2)
    every = [GREEDY, SEEDED, PENALIZED, grammar]
    with load(model, ctx_size=192) as alone:
        expected = [alone.generate(PROMPTS, params) for params in every]
    for parallel in (1, 4):
        with load(
            model, ctx_size=192, parallel=parallel, draft_mtp=3, chunk_size=24, reuse_prefix=True
        ) as llm:
            assert any("by the model's own layer" in note for note in llm.loaded.notes)
            for params, texts in zip(every, expected, strict=True):
                got = llm.generate(PROMPTS, params)
                same(got, texts)
                assert [c.logprobs for c in got] == [c.logprobs for c in texts]
                assert counts(got)[0] > 0 and all_free(llm)


@pytest.mark.parametrize("parallel", [1, 3])
def test_a_layer_that_is_right_is_accepted(certain: Path, parallel: int) -> None:
    with load(certain, ctx_size=192) as alone:
        expected = [alone.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
    with load(certain, ctx_size=192, parallel=parallel, draft_mtp=4, draft_ngram=0) as llm:
        for params, texts in zip((GREEDY, SEEDED), expected, strict=True):
            got = llm.generate(PROMPTS, params)
            same(got, texts)
            drafted, accepted = counts(got)
            assert accepted > 0.95 * drafted and drafted > 100
            assert parallel > 1 or all(c.timings.accept_length > 4 for c in got)
            assert all_free(llm)


class Watched:
    """Notes what `MtpDrafts` drafts, with the tokens before."""

    def __init__(self, drafts: MtpDrafts) -> None:
        self._draft = drafts.draft
        self.made: list[tuple[list[int], list[int]]] = []
        drafts.draft = self.draft  # type: ignore[method-assign]

    def draft(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        found = self._draft(wanted)
        self.made += [(list(sequence.token_ids), list(draft)) for sequence, draft in found.items()]
        return found


def test_drafts_are_what_the_layer_says_of_the_targets_rows(model: Path) -> None:
    """In chunks, in batches, after prefixes that are shared, accepted and rejected drafts: as if computed at once."""
    params = replace(GREEDY, max_tokens=12)
    options = {"ctx_size": 192, "backend": "reference", "draft_mtp": 2, "reuse_prefix": True}
    with load(model, **options, parallel=2, chunk_size=24) as llm:
        drafts = llm.loaded.draft
        assert isinstance(drafts, MtpDrafts)
        watched = Watched(drafts)
        first = llm.generate(PROMPTS[0], params)[0]
        for prompt in ([*PROMPTS[0], *first.tokens, 9], PROMPTS[4], PROMPTS[2]):
            llm.generate([prompt, PROMPTS[3]], params)
        checkpoint, backend = llm.loaded.checkpoint, llm.loaded.decoder.backend
        layer, device = DraftLayer(checkpoint), torch.device("cpu")
        made = [each for each in watched.made if each[1]]
        assert len(made) > 12 and any(len(draft) == 2 for _, draft in made)
        for ids, draft in made[:: len(made) // 8]:
            cache = KVCache.allocate(checkpoint.config, 192, device, keeps_hidden=True)
            own = KVCache.allocate(layer.config, 192, device)
            decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 192, 192)
            decoder.kept = cache.hidden
            mtp = DraftDecoder(layer.config, layer.tensors, decoder, 192)
            tables = list(cache.whole_tables)
            if len(ids) > 1:
                decoder.forward(prefill_batch([ids[:-1]], [0], [tables], device), cache.layers)
                mtp.forward(prefill_batch([ids[:-1]], [0], [tables[:1]], device), own.layers)
            token, expected = ids[-1], list[int]()
            for position in range(len(ids) - 1, len(ids) - 1 + len(draft)):
                logits = mtp.forward(decode_batch([token], [position], [tables[:1]], device), own.layers)
                token = int(logits[0].argmax())
                expected.append(token)
            assert draft == expected


SMALL = {"vocab_size": 500, "context_length": 192, "embedding_length": 64, "quant": "F32", "draft_layers": 1}
SMALL_EXPERTS = {"expert_feed_forward_length": 32, "shared_feed_forward_length": 64, "experts": 6}
OTHERS = {
    "qwen3.5moe-tiny": {**SIZES, **SMALL_EXPERTS, "draft_layers": 1},
    "qwen3-next-tiny": {**SIZES, **SMALL_EXPERTS, "draft_layers": 1},
    "glm4moe-tiny": {**SMALL, **SMALL_EXPERTS, "feed_forward_length": 96, "head_count": 2, "head_dim": 32},
}


@pytest.mark.parametrize("preset", OTHERS)
def test_texts_of_other_architectures_are_those_without_drafts(
    folder: Path, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of GLM also where sequences are preempted for want of blocks."""
    sizes = {"head_count_kv": 1, **OTHERS[preset]}
    path = write_synthetic(folder / f"{preset}.gguf", replace(PRESETS[preset], **sizes))  # type: ignore[arg-type]
    prompts = [list(range(10 * i, 10 * i + 12 + 3 * i)) for i in range(5)]
    params = replace(SEEDED, max_tokens=70)
    with load(path, ctx_size=192) as alone:
        expected = alone.generate(prompts, params)
    with load(path, ctx_size=192, parallel=5, draft_mtp=2, chunk_size=24) as llm:
        preempted: list[Sequence] = []
        if preset == "glm4moe-tiny":
            limit_blocks(llm, 6)
        preempt = llm.scheduler._preempt
        monkeypatch.setattr(
            llm.scheduler, "_preempt", lambda each, **how: (preempted.append(each), preempt(each, **how))
        )
        same(llm.generate(prompts, params), expected)
        assert preempted or preset != "glm4moe-tiny"
        got = llm.generate(prompts[:1], params)
        same(got, expected[:1])
        assert counts(got)[0] > 0 and all_free(llm)


def test_a_compiled_step_has_the_bits_of_an_eager_one(model: Path) -> None:
    """Rows of one sequence over a block's border, of which the newest alone is kept, and a row of another one."""
    with load(model, ctx_size=192, parallel=2, draft_mtp=3) as llm:
        drafts, hidden = llm.loaded.draft, llm.loaded.cache.hidden
        assert isinstance(drafts, MtpDrafts) and hidden is not None
        runner = drafts._runner
        llm.generate(PROMPTS[:2], replace(GREEDY, max_tokens=4))
        for rows in ([([7], 40)], [([7, 8, 9], 30), ([5], 0)], [([6], 3), ([9, 9], 32)]):
            steps = [
                SequenceRows(ids, start, [table]) for (ids, start), table in zip(rows, TABLES, strict=False)
            ]
            before, found = hidden.clone(), []
            for eager in (True, False):
                hidden.copy_(before)
                logits = runner.forward("decode", steps, eager=eager).clone()
                found.append((logits, hidden.clone()))
            (logits, kept), (same_logits, same_kept) = found
            assert torch.equal(logits, same_logits) and torch.equal(kept, same_kept)
            assert (kept != before).any(1).sum() == len(rows)


def test_memory_counts_the_layer_and_the_rows_that_it_reads(model: Path) -> None:
    with load(model, ctx_size=192, draft_mtp=2) as llm:
        assert llm.loaded.draft is not None and llm.loaded.draft_checkpoint is not None
        config, layer = llm.model_config, llm.loaded.draft_checkpoint
        with_layer, without = (CacheNeeds(config, 64, of).block_bytes("f16") for of in (layer.config, None))
        heads = 2 * 2 * SIZES["head_count_kv"] * SIZES["head_dim"]  # type: ignore[operator]
        assert with_layer[0] - without[0] == BLOCK_SIZE * (heads + 2 * SIZES["embedding_length"])  # type: ignore[operator]
        assert llm.loaded.nbytes >= llm.loaded.checkpoint.nbytes + layer.nbytes + llm.loaded.cache.nbytes
        blocks = llm.loaded.cache.pools[0].num_blocks + 1
        assert llm.loaded.draft.cache_bytes == blocks * BLOCK_SIZE * heads


def test_what_cannot_be_is_said_in_a_line(folder: Path, model: Path) -> None:
    plain = write_synthetic(folder / "plain.gguf", "tiny")
    for path, options, message in [
        (model, {"draft_mtp": 32}, r"draft_mtp 32: must be 0 \(off\) to 31 tokens"),
        (model, {"draft_vocab": 64}, r"draft_vocab 64: .*request its drafts \(--draft-mtp\)"),
        (model, {"draft_mtp": 2, "draft_model": plain}, "draft_mtp 2: the draft model .* drafts"),
        (model, {"draft_mtp": 2, "tensor_parallel": 2}, "draft_mtp 2: .* a model that 2 devices share"),
        (
            plain,
            {"draft_mtp": 2},
            r"plain\.gguf has no layer that drafts tokens \(MTP\); leave out --draft-mtp",
        ),
    ]:
        with pytest.raises(EngineError, match=message):
            load(path, **options)


def test_a_file_that_lacks_a_tensor_of_the_layer_runs_without_it(folder: Path, model: Path) -> None:
    path = folder / "damaged.gguf"
    with open_gguf(model) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            if not name.endswith("nextn.enorm.weight"):
                builder.tensor(name, tensor.shape, tensor.type_name, tensor.data)
        builder.write(path)
    with load(path, ctx_size=64) as llm:
        assert llm.generate([5], replace(GREEDY, max_tokens=1))
    with pytest.raises(EngineError, match=r"blk\.4\.nextn\.enorm\.weight.*missing"):
        load(path, ctx_size=64, draft_mtp=1)


def test_drafts_are_of_the_first_tokens_and_texts_of_all(certain: Path) -> None:
    with load(certain, ctx_size=192) as alone:
        expected = [alone.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
    with load(certain, ctx_size=192, draft_mtp=3, draft_vocab=250) as llm:
        drafts = llm.loaded.draft
        assert isinstance(drafts, MtpDrafts)
        assert llm.loaded.draft_checkpoint is not None
        assert llm.loaded.draft_checkpoint.config.vocab_size == 256
        less = 4 * SIZES["embedding_length"] * (500 - 256)  # type: ignore[operator]
        with load(certain, ctx_size=192, draft_mtp=3, draft_vocab=0) as whole:
            assert whole.loaded.draft is not None
            assert whole.loaded.draft.bytes_per_token - drafts.bytes_per_token == less
        watched = Watched(drafts)
        for params, texts in zip((GREEDY, SEEDED), expected, strict=True):
            same(llm.generate(PROMPTS, params), texts)
        drafted = {token for _, draft in watched.made for token in draft}
        assert len(drafted) > 5 and max(drafted) < 256 <= max(
            t for texts in expected for c in texts for t in c.tokens
        )
