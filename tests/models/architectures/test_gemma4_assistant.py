"""Gemma 4's assistants as folders and as GGUF: the logits of `transformers`, and drafts from the target's own cache."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine import LLM, EngineError
from quengine import convert as convert_folder
from quengine.kernels.backend import Backend
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.draft_rows import Drafting, rows_of
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.architectures.gemma4_assistant import sources
from quengine.models.assistant_decoder import AssistantDecoder
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.synthetic.presets import PRESETS
from quengine.models.synthetic.synthetic import synthetic_bytes, write_synthetic
from quengine.models.synthetic.synthetic_assistant import assistant_of
from quengine.runners.assistant_graphs import AssistantGraphs
from quengine.slot import Slot
from quengine.speculative.draft_assistant import AssistantDrafts
from tests.engine import test_steps_ahead as ahead
from tests.engine.speculative.draft_device import DraftDevice, drafts_on_device
from tests.engine.speculative.test_speculation import GREEDY, PENALIZED, SEEDED, all_free, counts, load, same
from tests.fork_server import without_interpreter
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.models.architectures.test_gemma4 import EXPERTS, LAYERED, SAME, SIZES, scales
from tests.models.convert.equal_files import check_equal
from tests.transformers_models import (
    CONTEXT,
    nmse,
    token_ids,
    transformers_model,
    unrounded_cache,
    write_model,
)

WINDOW = 64
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 3,
    "max_position_embeddings": CONTEXT,
    "sliding_window": WINDOW,
    "initializer_range": 0.12,
}
PLAIN = {**SIZES, **SAME, "sliding_window": WINDOW}
TARGETS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (PLAIN, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "experts": ({**PLAIN, **EXPERTS}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "layered": ({**LAYERED, "sliding_window": WINDOW}, {"num_key_value_heads": 1}),
}
"""Name -> keys of the target, and of its assistant."""


def without_keys(config: Any) -> list[str | None]:
    """`Gemma4TextConfig.kv_sharing_modes`, from release 5.23 on, refuses a model whose layers all use keys of another
    one, and stores none of a target whose layers share none. Older ones have none."""
    count, shared, kinds = config.num_hidden_layers, config.num_kv_shared_layers, config.layer_types
    owners = count - shared
    last = {kind: i for i, kind in enumerate(kinds[:owners])}
    return ["reuse" if i >= owners else "store" if last[kinds[i]] == i else None for i in range(count)]


def write_assistant(folder: Path, width: int, keys: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(1)
    text = transformers.Gemma4TextConfig(**{**TEXT, **keys})
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=width)
    model = transformers.Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(torch.randn_like(weight) * 0.2)
        scales(model)
    model.save_pretrained(folder)
    write_tokenizer(folder)


@pytest.fixture(scope="module", autouse=True)
def _sharing() -> Iterator[None]:
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            transformers.Gemma4TextConfig, "kv_sharing_modes", property(without_keys), raising=False
        )
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME and NAME.gguf of each target, NAME-assistant and NAME-assistant.gguf."""
    root, jobs = tmp_path_factory.mktemp("assistants"), []
    for name, (keys, own) in TARGETS.items():
        folder, assistant = root / name, root / f"{name}-assistant"
        write_model(folder, "gemma4_text", vocab=VOCAB, change=scales, **keys)
        write_tokenizer(folder)
        write_assistant(assistant, 64, own)
        jobs += [Conversion(each, each.with_suffix(".gguf"), "llama-bpe") for each in (folder, assistant)]
    convert(jobs)
    return root


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    for name in TARGETS:
        convert_folder(root / f"{name}-assistant", tmp_path / "ours.gguf", "f32", threads=1)
        check_equal(tmp_path / "ours.gguf", root / f"{name}-assistant.gguf", splits=False)


def theirs(root: Path, name: str, ids: list[int], count: int) -> tuple[Tensor, list[int]]:
    """Logits [count, vocab] and tokens of a draft after `ids`, whose last token the target has not computed."""
    import transformers

    model, _ = transformers_model(root / name)
    assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        root / f"{name}-assistant", dtype=torch.float64
    ).eval()
    with torch.no_grad():
        found = model.model(torch.tensor([ids[:-1]]), return_shared_kv_states=True)
        hidden, token, logits, tokens = found.last_hidden_state[:, -1:], ids[-1], [], []
        for _ in range(count):
            embedded = model.model.embed_tokens(torch.tensor([[token]]))
            out = assistant(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=dict(found.shared_kv_states),
            )
            hidden, token = out.last_hidden_state, int(out.logits[0, 0].argmax())
            logits.append(out.logits[0, 0])
            tokens.append(token)
    return torch.stack(logits), tokens


def ours(
    root: Path, name: str, kind: str, ids: list[int], tokens: list[int], backend: Backend[Any], rounded: bool
) -> Tensor:
    """The same logits, after the same tokens. rounded: keys and values are fp16."""
    target, assistant = (open_checkpoint(root / f"{each}{kind}") for each in (name, f"{name}-assistant"))
    decoder = Decoder(target.config, target.tensors, backend, CONTEXT, CONTEXT)
    drafter = AssistantDecoder(assistant.config, assistant.tensors, decoder, CONTEXT)
    cpu = torch.device("cpu")
    if rounded:
        held = KVCache.allocate(target.config, CONTEXT, cpu)
        cache, tables = held.layers, list(held.whole_tables)
    else:
        cache = unrounded_cache(target.config)
        tables = [list(range(CONTEXT // 32)) for _ in target.config.cache_groups]
    hidden = decoder.hidden(prefill_batch([ids[:-1]], [0], [tables], cpu), cache)[-1:]
    found = []
    for token in [ids[-1], *tokens[:-1]]:
        logits, hidden = drafter.step(decode_batch([token], [len(ids) - 2], [tables], cpu), hidden, cache)
        found.append(logits[0].double())
    return torch.stack(found)


@pytest.mark.parametrize("kind", ["", ".gguf"], ids=["folder", "gguf"])
@pytest.mark.parametrize("name", TARGETS)
def test_logits_of_a_draft_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    ids = token_ids(VOCAB).tolist()
    expected, tokens = theirs(root, name, ids, 3)
    exact = ours(root, name, kind, ids, tokens, ReferenceBackend(keep=True), False)
    assert nmse(exact, expected) < 1e-9
    assert nmse(ours(root, name, kind, ids, tokens, CpuBackend(1), True), expected) < 5e-5


def test_a_draft_sees_the_window_of_its_own_position(root: Path) -> None:
    """Of keys further back than the newest token's window nothing is read: their blocks may be of another sequence."""
    checkpoint, assistant = (
        open_checkpoint(root / "dense.gguf"),
        open_checkpoint(root / "dense-assistant.gguf"),
    )
    small, own = (replace(each.config, sliding_window=8) for each in (checkpoint, assistant))
    decoder = Decoder(small, checkpoint.tensors, ReferenceBackend(keep=True), CONTEXT, CONTEXT)
    drafter = AssistantDecoder(own, assistant.tensors, decoder, CONTEXT)
    cache, tables, cpu = unrounded_cache(small), [[0, 1, 2, 3]] * 2, torch.device("cpu")
    ids = token_ids(VOCAB).tolist()
    hidden = decoder.hidden(prefill_batch([ids[:-1]], [0], [tables], cpu), cache)[-1:]
    batch = decode_batch([ids[-1]], [len(ids) - 2], [tables], cpu)
    expected, _ = drafter.step(batch, hidden, cache)
    local = max(small.cache_groups[1].layers)
    first = len(ids) - 1 - 7  # of the window of position len(ids) - 1
    for changed, same_logits in ((first - 1, True), (first, False)):
        for part in (cache[local].k, cache[local].v):  # type: ignore[union-attr]
            part[changed] += 1.0
        logits, _ = drafter.step(batch, hidden, cache)
        assert torch.equal(logits, expected) == same_logits


PROMPTS = [list(range(5, 75)), [3, 1, 4, 1, 5, 9, 2, 6] * 5, [7], [*range(5, 69), 200]]


@pytest.mark.parametrize(("name", "parallel"), [("dense", 1), ("experts", 3), ("layered", 4)])
def test_texts_are_those_without_drafts(root: Path, name: str, parallel: int) -> None:
    target, assistant = root / f"{name}.gguf", root / f"{name}-assistant.gguf"
    every = [GREEDY, SEEDED, PENALIZED]
    with load(target) as alone:
        expected = [alone.generate(PROMPTS, params) for params in every]
    options = {"parallel": parallel, "draft_model": assistant, "draft_tokens": 3, "chunk_size": 24}
    with load(target, reuse_prefix=True, **options) as llm:
        assert any("from the model's own cache" in note for note in llm.loaded.notes)
        for params, texts in zip(every, expected, strict=True):
            got = llm.generate(PROMPTS, params)
            same(got, texts)
            assert counts(got)[0] > 0 and all_free(llm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", TARGETS)
def test_texts_on_a_gpu_are_those_without_drafts(root: Path, name: str) -> None:
    target, assistant, params = (
        root / f"{name}.gguf",
        root / f"{name}-assistant.gguf",
        replace(GREEDY, max_tokens=24),
    )
    with LLM(target, "cuda", CONTEXT, deterministic=True) as alone:
        expected = alone.generate(PROMPTS, params)
    options: dict[str, Any] = {"draft_model": assistant, "draft_tokens": 3, "deterministic": True}
    with LLM(target, "cuda", CONTEXT, parallel=4, **options) as llm:
        got = llm.generate(PROMPTS, params)
        same(got, expected)
        drafted, accepted = counts(got)
        assert drafted > accepted >= 0 and all_free(llm)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("parallel", [1, 4])
def test_a_gpu_drafts_within_the_step_that_verifies(root: Path, parallel: int) -> None:
    target, assistant = root / "layered.gguf", root / "layered-assistant.gguf"
    with LLM(target, "cuda", CONTEXT, parallel=4) as alone:
        expected = alone.generate(PROMPTS, GREEDY)
    with LLM(target, "cuda", CONTEXT, parallel=parallel, draft_model=assistant, draft_tokens=3) as llm:
        got = llm.generate(PROMPTS, GREEDY)
        decoder = llm.runner.device_decoder
        assert decoder is not None and isinstance(decoder.drafting, AssistantGraphs)
        assert decoder.drafting._launched > 0 and counts(got)[0] > 0 and all_free(llm)
    equal = [ours.tokens == theirs.tokens for ours, theirs in zip(got, expected, strict=True)]
    assert sum(equal) >= len(PROMPTS) - 1, equal  # near ties may be chosen otherwise


class AssistantDevice(DraftDevice):
    """`assistant_graphs.AssistantGraphs`, by the definitions. made: positions of newest tokens, and drafts after."""

    def __init__(self, llm: LLM, *rest: Any) -> None:
        super().__init__(llm, *rest)
        assert isinstance(llm.loaded.draft, AssistantDrafts)
        self._assistant, self.made = llm.loaded.draft._decoder, list[tuple[int, list[int]]]()

    @property
    def window(self) -> int:
        return 1

    def goes_on(self, slot: Slot) -> bool:
        return slot.undrafted > 0

    def _draft(self, drafting: Drafting, count: int) -> None:
        kept, hidden = self._target.cache.hidden, None
        assert kept is not None
        for made in range(count):
            known = self._drafted if made else self._newest.history
            placed = rows_of(drafting, self._newest, known, self._tables, made, 1)
            batch = ForwardBatch("decode", *placed[:3])
            if hidden is None:
                hidden = self._assistant.backend.hidden_before(batch, kept, None)
            before = replace(batch, positions=(batch.positions - made - 1).clamp(min=0))
            logits, hidden = self._assistant.step(before, hidden, self._target.cache.layers)
            self._note(drafting, logits.float(), placed.last)
        at = int(self._newest.positions[0])
        self.made.append((at, self._drafted[0, at + 1 : at + 1 + count].tolist()))


@pytest.mark.parametrize(("name", "prompt"), [("dense", 0), ("layered", 1)])
def test_the_device_drafts_what_transformers_does(root: Path, name: str, prompt: int) -> None:
    ids, params = PROMPTS[prompt], replace(GREEDY, max_tokens=16)
    with ahead.load(root / name, 1, ctx_size=CONTEXT) as alone:
        (expected,) = alone.generate([ids], params)
    options = {"draft_model": root / f"{name}-assistant", "draft_tokens": 2, "ctx_size": CONTEXT}
    with ahead.load(root / name, 1, **options) as llm:
        device, drafting = drafts_on_device(llm, 2, kind=AssistantDevice)
        assert isinstance(drafting, AssistantDevice)
        same(llm.generate([ids], params), [expected])
    every = [*ids, *expected.tokens]
    assert len(drafting.made) > 3 and any(entry.startswith("drafts") for entry in device.log)
    for at, draft in drafting.made[:: len(drafting.made) // 3]:
        assert theirs(root, name, every[: at + 1], len(draft))[1] == draft


@pytest.mark.parametrize("parallel", [1, 3])
def test_the_device_drafts_and_accepts_as_the_host_does(root: Path, parallel: int) -> None:
    with ahead.load(root / "dense", 1, ctx_size=CONTEXT) as plain:
        expected = [plain.generate(PROMPTS, params) for params in (GREEDY, SEEDED)]
    options = {"draft_model": root / "dense-assistant", "draft_tokens": 3, "ctx_size": CONTEXT}
    with ahead.load(root / "dense", parallel, **options) as llm:
        _, drafting = drafts_on_device(llm, 3, kind=AssistantDevice)
        for params, texts in zip((GREEDY, SEEDED), expected, strict=True):
            if parallel == 1:  # the only sequence of the device: all but every fifth token is drafted right
                for prompt, text in zip(PROMPTS, texts, strict=True):
                    ids = [*prompt, *text.tokens]
                    drafting.oracle = lambda _, at, ids=ids: ids[at] if at < len(ids) and at % 5 else None
                    got = llm.generate([prompt], params)
                    same(got, [text])
                    assert counts(got)[1] > len(text.tokens) // 4
            else:
                same(llm.generate(PROMPTS, params), texts)
        assert drafting.drafted and all_free(llm)


AHEAD = """
import sys
from pathlib import Path
from quengine.block_pool import CachePool
from quengine.kernels.cuda.aot.aot_compile import record
from quengine.models.checkpoint import open_checkpoint
from quengine.runners import cuda_graphs, draft_graphs
from quengine.runners.compile_kernels import KernelPlan, LayerPlan, compile_stages, stored_tensors
from quengine.runners.draft_graphs import DraftKey
from quengine.runners.graph_keys import GREEDY

for module in (cuda_graphs, draft_graphs):
    module.has_dependent_launch = lambda _: True
target, draft = (open_checkpoint(Path(each)) for each in sys.argv[1:])
layer = LayerPlan(draft.config, stored_tensors(draft.tensors), 8, 3, 16)
pools = [CachePool(16) for _ in target.config.cache_groups]
plan = KernelPlan(target.config, stored_tensors(target.tensors), 128, pools, 64, "f16", 16, 64, True, False, layer)
stages = compile_stages(plan)
record(stages[1])
kernels = {launch.key: launch.name for launch in record(stages[3])}
print(sorted(set(kernels.values())))
drafts = plan.drafts(plan.graphs())
assert [drafts.most_drafted(n) for n in (1, 2, 3, 4, 8, 9)] == [3, 3, 3, 3, 1, 0]
for key in (DraftKey(1, 3, GREEDY), DraftKey(4, 2, GREEDY)):
    missing = {launch.name: launch.key for launch in record(lambda: drafts.run(key)) if launch.key not in kernels}
    assert not missing, missing
"""


def test_no_draft_waits_for_the_compiler(root: Path) -> None:
    names = without_interpreter(AHEAD, root / "layered.gguf", root / "layered-assistant.gguf")
    for kernel in ("enter_kernel", "place_kernel", "accept_kernel", "before_kernel"):
        assert kernel in names


class Watched:
    """Notes what an assistant drafts, with the tokens before."""

    def __init__(self, llm: LLM) -> None:
        drafts = llm.loaded.draft
        assert isinstance(drafts, AssistantDrafts)
        self._draft, self.made = drafts.draft, list[tuple[list[int], list[int]]]()
        drafts.draft = self.draft  # type: ignore[method-assign]

    def draft(self, counts: Any) -> Any:
        found = self._draft(counts)
        self.made += [(list(each.token_ids), list(draft)) for each, draft in found.items()]
        return found


def test_drafts_are_of_the_targets_rows(root: Path) -> None:
    """In chunks, in batches, after prefixes that are shared, accepted and rejected drafts: as `transformers` drafts."""
    options = {"draft_model": root / "layered-assistant", "draft_tokens": 2, "backend": "reference"}
    with load(root / "layered", parallel=2, chunk_size=24, reuse_prefix=True, **options) as llm:
        watched, params = Watched(llm), replace(GREEDY, max_tokens=8)
        first = llm.generate(PROMPTS[0][:40], params)[0]
        llm.generate([[*PROMPTS[0][:40], *first.tokens, 9], PROMPTS[1]], params)
    made = [each for each in watched.made if each[1]]
    assert len(made) > 8
    for ids, draft in made[:: len(made) // 4]:
        assert theirs(root, "layered", ids, len(draft))[1] == draft


def edited(source: Path, folder: Path, text: dict[str, Any], **changes: Any) -> Path:
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config |= changes
    config["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ({"hidden_size_per_layer_input": 8}, {}, "hidden_size_per_layer_input: 8 is not implemented"),
        ({"enable_moe_block": True}, {}, "enable_moe_block: True is not implemented"),
        ({"num_kv_shared_layers": 2}, {}, "num_kv_shared_layers: 2 is not all 3 layers"),
        ({"model_type": "llama"}, {}, "text_config: is not one of"),
        ({}, {"backbone_hidden_size": 0}, "backbone_hidden_size: 0 is not"),
        ({}, {"backbone_hidden_size": 48}, "shape"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused(
    root: Path, tmp_path: Path, text: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        open_checkpoint(edited(root / "dense-assistant", tmp_path / "edited", text, **changes))


def test_a_target_of_other_sizes_is_refused(root: Path) -> None:
    target, own = (open_checkpoint(root / name).config for name in ("dense", "dense-assistant"))
    assert sources(own, target) == [1, 1, 3]
    for changed, message in [
        (replace(target, embedding_length=96), "hidden rows of 64 values, and the model has 96"),
        (replace(target, sliding_window=9), "a window of 64, and the model's one of 9"),
        (replace(target, sliding_window=None), "one with a window, and the model has none"),
    ]:
        with pytest.raises(EngineError, match=message):
            sources(own, changed)
    with pytest.raises(EngineError, match="2 key/value heads of 16, and layer 1 of the model has 1"):
        sources(own, open_checkpoint(root / "layered").config)


@pytest.mark.parametrize("preset", ["gemma-4-31b", "gemma-4-e4b", "gemma-4-tiny"])
def test_a_synthetic_assistant_fits_its_model(tmp_path: Path, preset: str) -> None:
    target = PRESETS[preset].config()
    spec = assistant_of(target)
    if preset == "gemma-4-31b":
        assert 460e6 < synthetic_bytes(spec) / 4.5 * 8 < 480e6  # as many weights as the published one has
    small = assistant_of(target, width=64, length=64)
    config = open_checkpoint(write_synthetic(tmp_path / "m.gguf", replace(small, vocab_size=400))).config
    assert [target.layer_windows[layer] for layer in sources(config, target)] == [
        *(target.sliding_window,) * 3,
        None,
    ]


def test_an_assistant_alone_generates_nothing(root: Path) -> None:
    with pytest.raises(EngineError, match="drafts tokens for another one: give that model, and this as"):
        load(root / "dense-assistant.gguf")
    with pytest.raises(EngineError, match="a model that 2 devices share"):
        load(root / "dense.gguf", draft_model=root / "dense-assistant.gguf", tensor_parallel=2)
