"""LoRA adapters beside the weights: the same logits as of a model with them merged, on every backend."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quengine.block_pool import CachePool
from quengine.kernels.cpu.lora import AdaptedCpu
from quengine.kernels.cuda.gemm import workspace
from quengine.kernels.cuda.gemm.matmul import paired_matmul
from quengine.kernels.cuda.lora import backend as lora_backend
from quengine.kernels.cuda.lora.backend import AdaptedCuda
from quengine.kernels.forward_batch import ForwardBatch, decode_batch, prefill_batch
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import Adapters, AdapterShapes, stacked
from quengine.kernels.lora.reference import AdaptedReference
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.memory import state_pool
from quengine.models.decoder import Decoder
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.synthetic.synthetic import write_synthetic
from tests.gguf_builder import ModelSizes
from tests.models.adapters import merged, random_adapters
from tests.tiny_models import write_tiny

IDS = [[5, 17, 250, 3, 99, 42, 42], [8, 120, 77], [1, 2, 3, 4, 5]]
TABLES = [[[1]], [[2]], [[3]]]
SCALES = [[1.0, 0.0], [0.0, -1.5], [0.5, 2.0]]
"""Of both adapters, for each sequence."""

CASES = {
    "llama": ("llama", ("attn_q", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")),
    "embeddings": ("llama", ("token_embd", "attn_q", "output")),
    "only queries": ("llama", ("attn_q",)),
    "norms of results": ("gemma2", ("attn_k", "attn_output", "ffn_up", "ffn_down")),
    "biases": ("qwen2", ("attn_q", "attn_k", "attn_v", "ffn_down")),
    "attention of a mixture": ("qwen3moe", ("attn_q", "attn_output")),
    "gated delta nets": ("qwen3next", ("attn_qkv", "attn_gate", "ssm_out", "ffn_up_shexp", "ffn_down_shexp")),
}

MOST_ERROR = {"reference": 2e-3, "cpu": 5e-3, "cuda": 1e-2}
"""Keys and values are rounded to fp16, and in these random models that grows."""


CPU = torch.device("cpu")


def device_of(kind: str) -> torch.device:
    """The interpreter runs CUDA's kernels where there is no GPU."""
    return torch.device("cuda" if kind == "cuda" and torch.cuda.is_available() else "cpu")


def backend_of(kind: str, adapters: Adapters) -> Any:
    if kind == "cuda":
        return AdaptedCuda(adapters, device_of(kind))
    return AdaptedReference(adapters, keep=True) if kind == "reference" else AdaptedCpu(adapters, 1)


def with_adapters(batch: ForwardBatch, scales: list[list[float]]) -> ForwardBatch:
    """scales: of each row."""
    device = batch.token_ids.device
    return dataclasses.replace(batch, adapters=torch.tensor(scales, device=device).T.contiguous())


def error(ours: Tensor, wanted: Tensor) -> float:
    """Relative to the size of the logits."""
    return float((ours - wanted).norm() / wanted.norm())


def in_halves(adapters: Adapters) -> Adapters:
    """The adapters with factors that fp16 holds, also times their scales."""
    changes = {
        name: [
            None if each is None else LowRank(*((half * 512).round() / 512 for half in (each.a, each.b)), 0.5)
            for each in of_name
        ]
        for name, of_name in adapters.changes.items()
    }
    return dataclasses.replace(adapters, changes=changes)


class Rig:
    """A decoder with adapters, and steps of all sequences, each with its own."""

    def __init__(
        self, path: Path, stems: tuple[str, ...], kind: str, tied: bool = False, halves: bool = False
    ) -> None:
        """tied: an output matrix that is the embedding has changes too. halves: changes are values of 16 bits."""
        self.checkpoint = GGUFCheckpoint(path)
        self.config, tensors = self.checkpoint.config, self.checkpoint.tensors
        self.adapters = random_adapters(tensors, stems, (4, 20))
        if halves:
            self.adapters = in_halves(self.adapters)
        if tied:
            table = {"output.weight": dataclasses.replace(tensors["token_embd.weight"], name="output.weight")}
            output = random_adapters(table, ("output",), (4, 20), seed=1).changes
            changes = {**self.adapters.changes, **output}
            self.adapters = dataclasses.replace(self.adapters, changes=changes, tied=True)
        assert self.adapters.changes
        self.backend, self.device = backend_of(kind, self.adapters), device_of(kind)
        self.decoder = Decoder(self.config, tensors, self.backend, 32, 32)
        self.cache = self._cache(self.device)
        self.tables = [table * len(self.config.cache_groups) for table in TABLES]

    def _cache(self, device: torch.device) -> KVCache:
        pools = [
            state_pool(self.config, group, 3) if group.is_state else CachePool(3)
            for group in self.config.cache_groups
        ]
        return KVCache.allocate(self.config, 32, device, "f16", pools)

    def prompts(self, scales: list[list[float]] | None, all_logits: bool = False) -> Tensor:
        batch = prefill_batch(IDS, [0] * 3, self.tables, self.device, all_logits)
        if scales is not None:
            batch = with_adapters(batch, [s for ids, s in zip(IDS, scales, strict=True) for _ in ids])
        return self.decoder.forward(batch, self.cache.layers).cpu()

    def next_tokens(self, scales: list[list[float]]) -> Tensor:
        batch = decode_batch([9, 8, 7], [len(ids) for ids in IDS], self.tables, self.device)
        return self.decoder.forward(with_adapters(batch, scales), self.cache.layers).cpu()

    def next_token(self, scales: list[float]) -> Tensor:
        """Of the first sequence alone, whose next token is cached already."""
        batch = decode_batch([9], [len(IDS[0])], self.tables[:1], self.device)
        return self.decoder.forward(with_adapters(batch, [scales]), self.cache.layers).cpu()

    def wanted(self, number: int, scales: list[float]) -> tuple[Tensor, Tensor]:
        """Logits after the prompt of a sequence and after its next token, with its adapters merged, in float64."""
        tensors = merged(self.checkpoint.tensors, self.adapters, scales)
        decoder = Decoder(self.config, tensors, ReferenceBackend(keep=True), 32, 32)
        cache, table = self._cache(CPU), self.tables[number]
        prompt = prefill_batch([IDS[number]], [0], [table], CPU)
        after = decoder.forward(prompt, cache.layers)
        step = decode_batch([9 - number], [len(IDS[number])], [table], CPU)
        return after[0], decoder.forward(step, cache.layers)[0]


@pytest.mark.parametrize("kind", ["reference", "cpu"])
def test_what_layers_get_of_tokens_beside_the_stream(tmp_path: Path, kind: str) -> None:
    """After the last layer with keys of its own a prompt's last rows alone go on, with their adapters."""
    path = write_synthetic(tmp_path / "m.gguf", "gemma-4-e-tiny")
    rig = Rig(path, ("attn_q", "ffn_down", "proj"), kind)
    assert not rig.backend.untaken
    prompts = rig.prompts(SCALES).double()
    for number, scales in enumerate(SCALES):
        assert error(prompts[number], rig.wanted(number, scales)[0]) < MOST_ERROR[kind]


@pytest.mark.parametrize("kind", ["reference", "cpu", "cuda"])
def test_a_table_of_rows_is_no_matrix_that_adapters_change(tmp_path: Path, kind: str) -> None:
    path = write_synthetic(tmp_path / "m.gguf", "gemma-4-e-tiny")
    rig = Rig(path, ("attn_q", "per_layer_token_embd"), kind)
    assert rig.backend.untaken == {"per_layer_token_embd.weight"}


@pytest.mark.cuda_kernel
@pytest.mark.skipif(torch.cuda.is_available(), reason="the limit is one of the interpreter's backend here")
def test_last_rows_of_a_prompt_for_cublas_are_few_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last layer's feed-forward reads the last row of each of several prompts, which together have more rows than
    a fused matmul takes."""
    monkeypatch.setattr(workspace, "fused_limit", lambda _hopper: 8)
    apart = list[int]()

    def noted(x: Any, *rest: Any) -> Tensor:
        apart.append(x.rows)
        return paired_matmul(x, *rest)

    monkeypatch.setattr(lora_backend, "paired_matmul", noted)
    path = write_tiny(tmp_path / "m.gguf", kind="Q8_0")
    rig = Rig(path, ("ffn_gate", "ffn_up"), "cuda")
    last, every = rig.prompts(SCALES).double(), rig.prompts(SCALES, all_logits=True).double()
    assert apart == [15] * (2 * rig.config.block_count - 1)  # the last layer of the first step has 3
    ends = torch.tensor([len(ids) for ids in IDS]).cumsum(0) - 1
    assert sum(map(len, IDS)) > 8 >= len(IDS)
    assert error(last, every[ends]) < 1e-2
    for number, scales in enumerate(SCALES):
        assert error(last[number], rig.wanted(number, scales)[0]) < MOST_ERROR["cuda"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapted")


@pytest.mark.parametrize("kind", ["reference", "cpu", "cuda"])
def test_an_embedding_that_is_the_output_matrix_has_changes_as_each(folder: Path, kind: str) -> None:
    """As PEFT has it, whose changes are of modules."""
    path = folder / "tied.gguf"
    if not path.exists():
        write_tiny(path, "gemma2", tied=True)
    rig = Rig(path, ("token_embd",), kind, tied=True)
    assert rig.config.tied_output and not rig.backend.untaken
    prompts, steps = rig.prompts(SCALES).double(), rig.next_tokens(SCALES).double()
    tensors = dict(rig.checkpoint.tensors)
    tensors["output.weight"] = dataclasses.replace(tensors["token_embd.weight"], name="output.weight")
    rig.checkpoint.tensors, rig.config = tensors, dataclasses.replace(rig.config, tied_output=False)
    for number, scales in enumerate(SCALES):
        for ours, wanted in zip((prompts, steps), rig.wanted(number, scales), strict=True):
            assert error(ours[number], wanted) < MOST_ERROR[kind]


@pytest.mark.parametrize("kind", ["reference", "cpu", "cuda"])
@pytest.mark.parametrize("case", CASES)
def test_sequences_with_different_adapters_in_one_step(folder: Path, case: str, kind: str) -> None:
    architecture, stems = CASES[case]
    path = folder / f"{architecture}.gguf"
    if not path.exists():
        write_tiny(path, architecture)
    rig = Rig(path, stems, kind)
    assert not rig.backend.untaken
    prompts, steps = rig.prompts(SCALES).double(), rig.next_tokens(SCALES).double()
    if not any(group.is_state for group in rig.config.cache_groups):
        first = rig.next_token(SCALES[0]).double()
        assert error(first[0], rig.wanted(0, SCALES[0])[1]) < MOST_ERROR[kind]
    apart = 0.0
    for number, scales in enumerate(SCALES):
        after, then = rig.wanted(number, scales)
        plain = rig.wanted(number, [0.0, 0.0])
        for ours, wanted, without in zip((prompts, steps), (after, then), plain, strict=True):
            assert error(ours[number], wanted) < MOST_ERROR[kind]
            apart = max(apart, error(without, wanted))
    assert apart > 0.2


@pytest.mark.parametrize("case", CASES)
def test_one_row_of_packed_weights_has_their_changes(folder: Path, case: str) -> None:
    """Within the launches of its products, where these are one each; the tests above have plain floats."""
    architecture, stems = CASES[case]
    path = folder / f"{architecture}-q8_0.gguf"
    if not path.exists():
        write_tiny(path, architecture, "Q8_0")
    rig = Rig(path, stems, "cuda")
    wanted = rig.wanted(0, SCALES[0])[1]
    assert error(rig.wanted(0, [0.0, 0.0])[1], wanted) > 0.1
    rig.prompts(SCALES)
    assert error(rig.next_token(SCALES[0])[0].double(), wanted) < MOST_ERROR["cuda"]


@pytest.mark.parametrize("case", ["llama", "norms of results", "biases"])
def test_several_rows_of_packed_weights_have_their_changes(folder: Path, case: str) -> None:
    """Of 16 bits, which Hopper adds in the launches of the products and of the norms."""
    architecture, stems = CASES[case]
    sizes = ModelSizes(architecture=architecture, embedding=64, feed_forward=128)
    path = write_tiny(folder / f"{architecture}-wide.gguf", architecture, "Q8_0", sizes=sizes)
    rig = Rig(path, stems, "cuda", halves=True)
    prompts, steps = rig.prompts(SCALES).double(), rig.next_tokens(SCALES).double()
    for number, scales in enumerate(SCALES):
        plain = rig.wanted(number, [0.0, 0.0])
        for ours, wanted, without in zip((prompts, steps), rig.wanted(number, scales), plain, strict=True):
            assert error(ours[number], wanted) < MOST_ERROR["cuda"]
            assert error(without, wanted) > 0.1


def test_shapes_for_the_compiler_are_those_of_the_adapters(folder: Path) -> None:
    path = folder / "llama.gguf"
    if not path.exists():
        write_tiny(path, "llama")
    adapters = random_adapters(GGUFCheckpoint(path).tensors, ("attn_q", "ffn_up"), (4, 20))
    halved = {
        name: [each and each._replace(a=each.a.half(), b=each.b.half(), scale=0.5) for each in changes]
        for name, changes in adapters.changes.items()
        if "attn_q" in name
    }
    shapes = AdapterShapes.of(dataclasses.replace(adapters, changes={**adapters.changes, **halved}))
    made = shapes.adapters()
    assert made.count == 2 and made.changes.keys() == adapters.changes.keys()
    for name, changes in made.changes.items():
        given = adapters.changes[name]
        rows, cols = next((len(each.b), each.a.shape[1]) for each in given if each is not None)
        without_data = stacked([changes], [rows], cols)
        assert without_data.a.is_meta and without_data.a.shape == stacked([given], [rows], cols).a.shape
        assert without_data.b.dtype == (torch.float16 if name in halved else torch.float32)
