"""Models of an architecture as Hugging Face folders and as the GGUF files that llama.cpp's converter makes of them."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine.kernels.backend import Backend
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.gemm.amx import two_term_product
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.moe.router import Routing
from quengine.kernels.quant_tensor import QuantTensor
from quengine.kernels.reference import ReferenceBackend, ReferenceWeight
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.gguf import StringArray, open_gguf
from tests.forward import forward
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_sentencepiece, write_tokenizer
from tests.transformers_models import TOKENS, nmse, our_logits, token_ids, transformers_logits, write_model

Tensors = Mapping[str, QuantTensor]
Fault = Callable[[ModelConfig, Tensors], tuple[ModelConfig, Tensors]]

TOLERANCE = 1e-9
"""Of the reference backend: `transformers` rounds norms and angles to float32."""

CPU_TOLERANCE = 5e-5
"""Of the CPU's kernels at the worst position, to the reference backend over the same cache in fp16."""

IN_HAND = 20
"""What rounds most, AMX (kernels/cpu/gemm/amx.py), makes at most 1 / IN_HAND of the limit on these models, and a wrong
computation at least IN_HAND times it."""

FILES = {
    "folder": "",
    "gguf": ".gguf",
    "fused folder": "-fused",
    "old gguf": "-old.gguf",
    "fused gguf": "-fused.gguf",
}
"""Kind -> what a model's name ends with. The last three hold experts in other forms: a folder all of a layer in one
tensor, as `transformers` 5 may save them; a file each in its own, as llama.cpp's first converters wrote them, or gate
and up of all in one, as its converter does by an option."""

KINDS = ("folder", "gguf")
MIXTURE_KINDS = tuple(FILES)


@dataclass(frozen=True)
class Case:
    """A model for `write_model`. `tokenizer` is the class that tokenizer_config.json names, "" for SentencePiece.

    converts: the converter writes all of it; where not, there is only the folder.
    mixture: of experts, written in every form. gate_up: also as a file with gate and up of experts in one tensor.
    change: alters the weights of the `transformers` model. edit: the folder before anything reads it.
    drafts: the converter writes layers that draft tokens, which `edit` then adds. has_gate: experts have gates.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    vision: bool = False
    tokenizer: str = "PreTrainedTokenizerFast"
    converts: bool = True
    mixture: bool = False
    gate_up: bool = False
    has_gate: bool = True
    change: Callable[[Any], None] | None = None
    edit: Callable[[Path], Any] | None = None
    drafts: bool = True

    @property
    def kinds(self) -> list[str]:
        every = [kind for kind in MIXTURE_KINDS if self.has_gate or kind != "fused gguf"]
        kinds = every if self.mixture else (*KINDS, *["fused gguf"] * self.gate_up)
        return [kind for kind in kinds if self.converts or not kind.endswith("gguf")]

    @property
    def vocab(self) -> int:
        return VOCAB if self.tokenizer else 32768


def write_cases(root: Path, cases: dict[str, Case]) -> Path:
    """NAME, the folder, NAME.gguf and NAME.pt, the logits of `transformers`, of every case; returns `root`."""
    torch.set_num_threads(1)  # matrices this small take longer on several
    jobs = []
    for name, case in cases.items():
        folder = root / name
        options = write_case(folder, case)
        torch.save(transformers_logits(folder, case.vocab), root / f"{name}.pt")
        if case.mixture:
            fused = path_of(root, name, "fused folder")
            shutil.copytree(folder, fused)
            write_model(fused, case.model_type, fused=True, **options)
        if case.converts:
            jobs.append(Conversion(folder, root / f"{name}.gguf", "llama-bpe", drafts=case.drafts))
        if "fused gguf" in case.kinds:
            fused = path_of(root, name, "fused gguf")
            jobs.append(Conversion(folder, fused, "llama-bpe", gate_up=True, drafts=case.drafts))
    convert(jobs)
    for name, case in cases.items():
        if case.mixture and case.converts:
            write_old_experts(path_of(root, name, "gguf"), path_of(root, name, "old gguf"))
    return root


def write_case(folder: Path, case: Case) -> dict[str, Any]:
    """The folder of a case; returns what `write_model` was given."""
    options = {"vocab": case.vocab, "change": case.change, **case.config}
    write_model(folder, case.model_type, case.vision, **options)
    if case.edit is not None:
        case.edit(folder)
    if case.tokenizer:
        write_tokenizer(folder, case.tokenizer)
    else:
        write_sentencepiece(folder)
    return options


def write_old_experts(source: Path, path: Path) -> None:
    """A GGUF file with the metadata and weights of `source`, each expert's in a tensor of its own."""
    with open_gguf(source) as file:
        builder = GGUFBuilder()
        for key, value in file.metadata.items():
            builder.kv(key, list(value) if isinstance(value, StringArray) else value)
        for name, tensor in file.tensors.items():
            base = name.removesuffix("_exps.weight")
            if base == name:
                builder.tensor(name, tensor.shape, tensor.type_name, tensor.data)
                continue
            for expert, data in enumerate(np.split(tensor.data, tensor.shape[0])):
                builder.tensor(f"{base}.{expert}.weight", tensor.shape[1:], tensor.type_name, data)
        builder.write(path)


def path_of(root: Path, name: str, kind: str) -> Path:
    return root / f"{name}{FILES[kind]}"


def opened(root: Path, name: str, kind: str) -> Checkpoint:
    return open_checkpoint(path_of(root, name, kind))


_shared = lru_cache(maxsize=32)(opened)
"""For what only computes with it: a file takes as long to open as a step."""


class ChoosingReference(ReferenceBackend):
    """The reference backend; `chosen` has the experts of each row [T, k], a tensor for each call of `route`."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self.chosen: list[Tensor] = []

    def route(self, *arguments: Any, **options: Any) -> Routing:
        routing = super().route(*arguments, **options)
        self.chosen.append(routing.selected)
        return routing


class GivenExperts:
    """For a backend: each row of layer i has its experts in `chosen[i]`, [positions, k].

    Between experts that are all but equal a cache in fp16 may tip the choice, which says nothing of the kernels.
    """

    def __init__(self, chosen: list[Tensor], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._chosen = cycle(chosen)

    def route(self, batch: ForwardBatch, *arguments: Any) -> Routing:
        routing: Routing = super().route(batch, *arguments, next(self._chosen)[batch.positions])  # type: ignore[misc]
        return routing


class CpuWithGivenExperts(GivenExperts, CpuBackend):
    pass


class ReferenceWithGivenExperts(GivenExperts, ReferenceBackend):
    pass


class RoundsAsAmx(ReferenceWithGivenExperts):
    """Products of two bf16 terms, as the CPU's kernels make them where a processor has AMX; on any processor."""

    def _matmul(self, x: Tensor, weight: ReferenceWeight) -> Tensor:
        assert weight.dense is not None
        return two_term_product(x.float(), weight.dense.float()).float().double()


@dataclass(frozen=True)
class ReferenceRun:
    """difference: of the reference backend's logits to those of `transformers`. chosen: the experts of each token
    [TOKENS, k], a tensor for each layer with experts."""

    difference: float
    chosen: list[Tensor]


@cache
def reference_run(root: Path, name: str, kind: str, vocab: int) -> ReferenceRun:
    backend = ChoosingReference()
    logits = our_logits(_shared(root, name, kind), vocab, backend)
    return ReferenceRun(nmse(logits, torch.load(root / f"{name}.pt")), backend.chosen)


def fp16_logits(
    config: ModelConfig, tensors: Tensors, backend: Backend, vocab: int, decode: bool = False
) -> Tensor:
    """[TOKENS, vocab] over a cache in fp16, operation by operation: a prompt of 40 tokens; or one of 28, six single
    ones, which begin in the first block of the cache and go on in the second, and the rest as a prompt."""
    ids = token_ids(vocab)
    decoder = Decoder(config, tensors, backend, 64, 64)
    cache = KVCache.allocate(config, 64, torch.device("cpu")).layers
    cuts = [0, *range(28, 35), TOKENS] if decode else [0, TOKENS]
    rows = [forward(decoder, ids[a:b], cache, a, all_logits=True) for a, b in pairwise(cuts)]
    return torch.cat(rows).double()


@cache
def expected(root: Path, name: str, kind: str, vocab: int) -> Tensor:
    """The reference backend's logits over a cache in fp16, with the experts that it chooses over an exact one."""
    checkpoint, chosen = _shared(root, name, kind), reference_run(root, name, kind, vocab).chosen
    return fp16_logits(checkpoint.config, checkpoint.tensors, ReferenceWithGivenExperts(chosen, True), vocab)


def cpu_difference(
    root: Path, name: str, kind: str, case: Case, decode: bool = False, fault: Fault | None = None
) -> float:
    """Of the logits of the CPU's kernels to `expected`; `fault` changes what they compute."""
    checkpoint = _shared(root, name, kind)
    config, tensors = checkpoint.config, checkpoint.tensors
    if fault is not None:
        config, tensors = fault(config, tensors)
    backend = CpuWithGivenExperts(reference_run(root, name, kind, case.vocab).chosen, 1)
    logits = fp16_logits(config, tensors, backend, case.vocab, decode)
    return nmse(logits, expected(root, name, kind, case.vocab))


def engine_difference(root: Path, name: str, kind: str, case: Case, decode: bool) -> float:
    """The same of the whole engine on the CPU, in chunks of 16 tokens, or token by token."""
    path = path_of(root, name, kind)
    with LLM(path, device="cpu", threads=1, ctx_size=64, chunk_size=16) as llm:
        logits = llm.logits(token_ids(case.vocab).tolist(), decode=decode)
    return nmse(logits.double(), expected(root, name, kind, case.vocab))


def amx_difference(root: Path, name: str, kind: str, case: Case) -> float:
    """What AMX's rounding of products changes of `expected`."""
    checkpoint, chosen = _shared(root, name, kind), reference_run(root, name, kind, case.vocab).chosen
    logits = fp16_logits(checkpoint.config, checkpoint.tensors, RoundsAsAmx(chosen, True), case.vocab)
    return nmse(logits, expected(root, name, kind, case.vocab))


def _without_a_norm(config: ModelConfig, tensors: Tensors) -> tuple[ModelConfig, Tensors]:
    """The weights of the second layer's first norm are ones."""
    norm = next(
        tensor for name, tensor in tensors.items() if name.startswith("blk.1.") and "norm.weight" in name
    )
    ones = torch.ones(norm.shape).view(torch.uint8).view(norm.data.shape)
    return config, {**tensors, norm.name: replace(norm, data=ones)}


def _exchanged(config: ModelConfig, tensors: Tensors) -> tuple[ModelConfig, Tensors]:
    """The attention outputs of the first two layers that have one stand in each other's place."""
    first, second = [tensors[name] for name in tensors if name.endswith(".attn_output.weight")][:2]
    return config, {**tensors, first.name: second, second.name: first}


FAULTS: dict[str, Fault] = {
    "rope base": lambda config, tensors: (
        replace(config, rope_freq_base=config.rope_freq_base / 100, rope_freq_base_swa=None),
        tensors,
    ),
    "attention scale": lambda config, tensors: (
        replace(config, attention_scale=2 * (config.attention_scale or config.head_dim**-0.5)),
        tensors,
    ),
    "norm": _without_a_norm,
    "layers": _exchanged,
}
"""Name -> one thing computed wrongly."""


class SameLogits:
    """The logits of every file of a module's CASES are those of `transformers`. A module derives its test class.

    main: the cases that the whole engine runs too, of every kind of `engine_kinds`. The CPU's kernels compute every
    kind of those, and of the others the folder and the GGUF file. faults: of FAULTS those that concern the model.
    """

    main: ClassVar[Sequence[str]] = ("plain",)
    engine_kinds: ClassVar[Sequence[str]] = KINDS
    faults: ClassVar[Sequence[str]] = tuple(FAULTS)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cases: dict[str, Case] = metafunc.module.CASES
        every = [(name, kind) for name, case in cases.items() for kind in case.kinds]
        files = {
            "file": every,
            "cpu_file": [(name, kind) for name, kind in every if name in self.main or kind in KINDS],
            "engine_file": [(name, kind) for name in self.main for kind in self.engine_kinds],
            "folder": [(name, "folder") for name in cases],
            "main_folder": [(name, "folder") for name in self.main[:1]],
        }
        for argument, found in files.items():
            if argument in metafunc.fixturenames:
                values = [pytest.param(file, cases[file[0]], id="-".join(file)) for file in found]
                metafunc.parametrize((argument, "case"), values)
        if "fault" in metafunc.fixturenames:
            metafunc.parametrize("fault", self.faults)

    def test_the_reference_backend_has_them(self, root: Path, file: tuple[str, str], case: Case) -> None:
        assert reference_run(root, *file, case.vocab).difference < TOLERANCE

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_the_cpus_kernels_compute_them(
        self, root: Path, cpu_file: tuple[str, str], case: Case, decode: bool
    ) -> None:
        assert cpu_difference(root, *cpu_file, case, decode) < CPU_TOLERANCE

    def test_the_limit_has_room_for_any_processor(
        self, root: Path, folder: tuple[str, str], case: Case
    ) -> None:
        assert amx_difference(root, *folder, case) < CPU_TOLERANCE / IN_HAND

    def test_a_fault_is_far_outside_of_it(
        self, root: Path, main_folder: tuple[str, str], case: Case, fault: str
    ) -> None:
        assert cpu_difference(root, *main_folder, case, fault=FAULTS[fault]) > CPU_TOLERANCE * IN_HAND

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_the_engine_computes_them_on_the_cpu(
        self, root: Path, engine_file: tuple[str, str], case: Case, decode: bool
    ) -> None:
        assert engine_difference(root, *engine_file, case, decode) < CPU_TOLERANCE
