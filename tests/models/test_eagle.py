"""EAGLE-3 draft models: logits against the paper's definition in float64, of folders and of llama.cpp's GGUF files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quengine import EngineError
from quengine import convert as convert_folder
from quengine.kernels.backend import Backend
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.hidden_rows import NOT_DRAFTED
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.eagle_checkpoint import EagleCheckpoint, Fusion, open_eagle
from quengine.models.eagle_decoder import EagleDecoder
from quengine.models.fused_rows import FusedRows
from quengine.models.gguf import StringArray, open_gguf
from tests.eagle_files import Definition, Eagle
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_tokenizer
from tests.llama_cpp_eagle import llama_cpp_eagle_logits
from tests.models.convert.equal_files import check_equal
from tests.models.test_draft_layer import in_float64
from tests.transformers_models import (
    TOKENS,
    edit,
    edit_tensors,
    nmse,
    token_ids,
    transformers_model,
    write_model,
)

CONTEXT = 64
KINDS = {
    "plain": Eagle(),
    "speculators": Eagle(speculators=True, normed_residual=True, own_embedding=True),
    "narrow": Eagle(width=32, own_embedding=True, drafted=VOCAB, layers=(2, 5)),
    "last": Eagle(layers=(0, 3, 8)),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target` and NAME, folders, and each with .gguf, by llama.cpp's converter."""
    found = tmp_path_factory.mktemp("eagle")
    torch.set_num_threads(1)
    target = write_model(found / "target", "llama", vocab=VOCAB, num_hidden_layers=8)
    write_tokenizer(target)
    jobs = [Conversion(target, found / "target.gguf", "llama-bpe")]
    for name, kind in KINDS.items():
        folder = kind.write(found / name)
        jobs.append(Conversion(folder, found / f"{name}.gguf", "llama-bpe", target=target))
    convert(jobs)
    return found


def test_converted_files_are_llama_cpps(root: Path, tmp_path: Path) -> None:
    ours, target = tmp_path / "ours.gguf", root / "target"
    for name in KINDS:
        convert_folder(root / name, ours, "f32", target_folder=target, threads=1)
        check_equal(ours, root / f"{name}.gguf", splits=False)
    for folder, whole, problem in (
        ("plain", None, r"an EAGLE-3 draft model needs its target's folder: --target FOLDER"),
        ("target", target, r"--target .*target: .*target is no EAGLE-3 draft model"),
        ("plain", tmp_path, "no folder of a model: it has no config.json"),
    ):
        with pytest.raises(EngineError, match=problem):
            convert_folder(root / folder, ours, target_folder=whole)


def inputs_of(folder: Path, layers: Any, ids: Tensor) -> tuple[list[Tensor], Tensor]:
    """What `transformers` gives these layers of the target, float64 [T, width] each, and its embedding."""
    model, _ = transformers_model(folder)
    seen: dict[int, Tensor] = {}
    decoder = model.model
    for number, layer in enumerate(decoder.layers):
        layer.register_forward_pre_hook(lambda _, args, number=number: seen.update({number: args[0][0]}))
    decoder.norm.register_forward_pre_hook(lambda _, args: seen.update({len(decoder.layers): args[0][0]}))
    with torch.no_grad():
        model(ids[None])
    return [seen[layer] for layer in layers], decoder.embed_tokens.weight.detach()


class Run:
    """A target and its draft model on a backend, after a prompt. exact: caches keep float64."""

    def __init__(
        self, target: Checkpoint, eagle: EagleCheckpoint, backend: Backend[Any], exact: bool
    ) -> None:
        device = backend.device
        cache = KVCache.allocate(target.config, CONTEXT, device)
        cache.keep_hidden(eagle.config.embedding_length, torch.float32, device)
        self.own = KVCache.allocate(eagle.config, CONTEXT, device)
        if exact:
            cache, self.own = in_float64(cache), in_float64(self.own)
        assert cache.hidden is not None
        self.decoder = Decoder(target.config, target.tensors, backend, CONTEXT, CONTEXT)
        self.decoder.fused = FusedRows.load(eagle.fusion.layers, eagle.fusion.tensors, cache.hidden, backend)
        self.drafts = EagleDecoder(eagle.config, eagle.tensors, self.decoder, eagle.drafted, CONTEXT)
        self.cache, self.device, self.tables = cache, device, list(cache.whole_tables)

    def prompt(self, ids: list[int]) -> None:
        for first, last in ((0, 24), (24, len(ids))):  # over a chunk's border, too
            chunk = prefill_batch([ids[first:last]], [first], [self.tables], self.device)
            self.decoder.forward(chunk, self.cache.layers)

    def prompt_logits(self, ids: list[int]) -> Tensor:
        """After each token but the first."""
        batch = prefill_batch([ids[1:]], [1], [self.tables[:1]], self.device, all_logits=True)
        return self.drafts.forward(batch, self.own.layers).double()

    def step(self, token: int, position: int) -> Tensor:
        batch = decode_batch([token], [position], [self.tables[:1]], self.device)
        return self.drafts.forward(batch, self.own.layers).double()


def opened(root: Path, name: str, kind: str) -> tuple[Checkpoint, EagleCheckpoint]:
    target = open_checkpoint(root / f"target{kind}")
    eagle = open_eagle(root / f"{name}{kind}", target)
    assert eagle is not None
    return target, eagle


@pytest.mark.parametrize("kind", ["", ".gguf"], ids=["folder", "gguf"])
@pytest.mark.parametrize("name", KINDS)
def test_logits_are_those_of_the_definition(root: Path, name: str, kind: str) -> None:
    """Of a prompt, of its tokens one by one, and of a draft over the layer's own rows."""
    ids = token_ids(VOCAB)
    given, embedding = inputs_of(root / "target", KINDS[name].layers, ids)
    definition = Definition(root / name, embedding)
    g = definition.fused(given)
    expected, after = definition.rows(ids[1:].tolist(), g[:-1])
    drafted = definition.tokens
    target, eagle = opened(root, name, kind)
    for backend, exact, budget in ((ReferenceBackend(keep=True), True, 1e-9), (CpuBackend(1), False, 2e-4)):
        run = Run(target, eagle, backend, exact)
        run.prompt(ids.tolist())
        logits = run.prompt_logits(ids.tolist())
        assert logits.shape == (TOKENS - 1, VOCAB)
        assert nmse(logits[:, drafted], expected) < budget
        others = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, drafted, False)
        assert (logits[:, others] < 0.9 * NOT_DRAFTED).all()
        assert run.cache.hidden is not None
        kept = run.cache.hidden.clone()
        for position in range(1, TOKENS):
            row = run.step(int(ids[position]), position)
            assert nmse(row[:, drafted], expected[position - 1 : position]) < budget
            run.cache.hidden.copy_(kept)
        tokens, rows = ids[1:].tolist(), g[:-1]
        for position in range(TOKENS - 1, TOKENS + 3):  # the last token once more, then what follows it
            token = tokens[-1]
            row = run.step(token, position)
            wanted, after = definition.rows(tokens, rows)
            assert nmse(row[:, drafted], wanted[-1:]) < budget
            tokens, rows = [*tokens, int(drafted[wanted[-1].argmax()])], torch.cat([rows, after[-1:]])


def test_logits_are_those_of_llama_cpp(root: Path) -> None:
    """Which keeps keys and values in fp16, as this engine does."""
    kind = KINDS["speculators"]  # llama.cpp's functions take a draft model with an embedding of its own
    files = root / "target.gguf", root / "speculators.gguf"
    theirs = torch.from_numpy(llama_cpp_eagle_logits(*files, kind.layers, 64, VOCAB)).double()
    run = Run(*opened(root, "speculators", ".gguf"), CpuBackend(1), exact=False)
    run.prompt(token_ids(VOCAB).tolist())
    logits = run.prompt_logits(token_ids(VOCAB).tolist())
    drafted = theirs[0] > -1e9
    assert drafted.sum() == kind.drafted and torch.equal(logits[0] > 0.9 * NOT_DRAFTED, drafted)
    assert nmse(logits[:, drafted], theirs[:, drafted]) < 1e-4


def test_folder_and_file_have_the_same_bits(root: Path) -> None:
    """The kept rows, and the drafts' logits, where only the order of a head's elements differs, nearly."""
    runs = []
    for kind in ("", ".gguf"):
        run = Run(*opened(root, "plain", kind), CpuBackend(1), exact=False)
        run.prompt(token_ids(VOCAB).tolist())
        runs.append((run.cache.hidden, run.prompt_logits(token_ids(VOCAB).tolist())))
    (kept, logits), (same_kept, same_logits) = runs
    assert kept is not None and same_kept is not None
    assert torch.equal(kept, same_kept) and (kept != 0).any()
    assert nmse(logits, same_logits) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_hidden_size": 128}, r"does not fit target: it reads hidden rows of 128 elements.* have 64"),
        ({"vocab_size": 300}, r"a vocabulary of 300 tokens, which here has 288"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, r"inputs of layers 1, 4, 9, of 8 here"),
        (
            {"eagle_aux_hidden_state_layer_ids": [4, 1]},
            r"\[4, 1\] are not numbers of 1 to 16 layers in order",
        ),
        ({"eagle_aux_hidden_state_layer_ids": "2"}, r"eagle_aux.*'2' is not a list"),
        ({"draft_vocab_size": 99}, r"lm_head.weight' has shape \[100, 64\], config.json needs \[99, 64\]"),
        ({"num_hidden_layers": 2}, r"num_hidden_layers: 2: draft models have 1 layer"),
        ({"norm_before_fc": True}, r"norm_before_fc: norms before fc are not implemented"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(
    root: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = KINDS["plain"].write(tmp_path / "draft")
    edit(folder, **change)
    with pytest.raises(EngineError, match=message) as raised:
        open_eagle(folder, open_checkpoint(root / "target"))
    assert "\n" not in str(raised.value)


def rewritten(source: Path, path: Path, drafted: list[int] | None, drop: str = "") -> Path:
    """A GGUF file with other drafted tokens (None: without), and without a key."""
    with open_gguf(source) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            if key != drop:
                builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            if name != "d2t":
                builder.tensor(name, tensor.shape, tensor.type_name, tensor.data)
        if drafted is not None:
            builder.tensor("d2t", (len(drafted),), 27, np.array(drafted).view(np.uint8))
        return builder.write(path)


def test_damaged_files_are_refused_in_a_line(root: Path, tmp_path: Path) -> None:
    target, every = open_checkpoint(root / "target.gguf"), list(range(100))
    for number, (drafted, drop, message) in enumerate(
        [
            ([*every[:-1], VOCAB], "", r"\(d2t\) are from 0 to 288, the target's from 0 to 287"),
            ([*every[:-1], 3], "", r"\(d2t\) are 99 different ones of 100"),
            (None, "", r"shape \[100, 64\].* needs \[288, 64\]"),
            (every[:-1], "", r"shape \[100, 64\].* needs \[99, 64\]"),
            (every, "eagle3.target_layers", "eagle3.target_layers.*missing"),
            (every, "eagle3.target_hidden_size", "eagle3.target_hidden_size.*missing"),
        ]
    ):
        path = rewritten(root / "plain.gguf", tmp_path / f"{number}.gguf", drafted, drop)
        with pytest.raises(EngineError, match=message) as raised:
            open_eagle(path, target)
        assert "\n" not in str(raised.value)
    folder = KINDS["plain"].write(tmp_path / "folder")
    edit_tensors(folder, lambda held: held.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}))
    with pytest.raises(EngineError, match=r"q_norm.weight': a draft model with it is not implemented"):
        open_eagle(folder, target)


def test_blocks_over_the_columns_of_two_layers_are_refused(root: Path) -> None:
    _, eagle = opened(root, "plain", ".gguf")
    data = torch.zeros(64, 144, dtype=torch.uint8)
    whole = QuantTensor("fc.weight", FORMATS["Q4_K"], (64, 256), data)
    with pytest.raises(EngineError, match="Q4_K, whose blocks do not end at multiples of 64 columns"):
        Fusion(whole, (1, 2, 3, 4), eagle._file)


def test_other_files_are_no_such_models(root: Path) -> None:
    target = open_checkpoint(root / "target")
    assert open_eagle(root / "target", target) is None
    assert open_eagle(root / "target.gguf", target) is None
    with pytest.raises(EngineError, match="an EAGLE-3 draft model; give it beside the model"):
        open_checkpoint(root / "plain.gguf")
    narrow = replace(KINDS["narrow"], own_embedding=False).write(root / "lacking")
    with pytest.raises(EngineError, match="no embedding of its own, and a width of 32 in place of 64"):
        open_eagle(narrow, target)
