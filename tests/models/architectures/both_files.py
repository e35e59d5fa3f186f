"""Models of an architecture as Hugging Face folders and as the GGUF files that llama.cpp's converter makes of them."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from quengine import LLM
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.moe.router import Routing
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import Checkpoint, open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.gguf import StringArray, open_gguf
from tests.forward import forward
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_convert import VOCAB, Conversion, convert, write_sentencepiece, write_tokenizer
from tests.transformers_models import TOKENS, nmse, our_logits, token_ids, transformers_logits, write_model

TOLERANCE = 1e-9
"""Of the reference backend: `transformers` rounds norms and angles to float32."""

CPU_TOLERANCE = 1e-4
"""Of the CPU's kernels at the worst position, over a cache in fp16; a llama of these sizes gives 8e-6."""

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
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    vision: bool = False
    tokenizer: str = "PreTrainedTokenizerFast"
    converts: bool = True
    mixture: bool = False
    gate_up: bool = False
    change: Callable[[Any], None] | None = None
    edit: Callable[[Path], Any] | None = None

    @property
    def kinds(self) -> list[str]:
        kinds = MIXTURE_KINDS if self.mixture else (*KINDS, *["fused gguf"] * self.gate_up)
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
        options = {"vocab": case.vocab, "change": case.change, **case.config}
        write_model(folder, case.model_type, case.vision, **options)
        if case.edit is not None:
            case.edit(folder)
        torch.save(transformers_logits(folder, case.vocab), root / f"{name}.pt")
        if case.tokenizer:
            write_tokenizer(folder, case.tokenizer)
        else:
            write_sentencepiece(folder)
        if case.mixture:
            fused = path_of(root, name, "fused folder")
            shutil.copytree(folder, fused)
            write_model(fused, case.model_type, fused=True, **options)
        if case.converts:
            jobs.append(Conversion(folder, root / f"{name}.gguf", "llama-bpe"))
        if "fused gguf" in case.kinds:
            jobs.append(Conversion(folder, path_of(root, name, "fused gguf"), "llama-bpe", gate_up=True))
    convert(jobs)
    for name, case in cases.items():
        if case.mixture and case.converts:
            write_old_experts(path_of(root, name, "gguf"), path_of(root, name, "old gguf"))
    return root


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


class ChoosingReference(ReferenceBackend):
    """The reference backend; `chosen` has the experts of each row [T, k], a tensor for each call of `route`."""

    def __init__(self) -> None:
        super().__init__(keep=True)
        self.chosen: list[Tensor] = []

    def route(self, *arguments: Any, **options: Any) -> Routing:
        routing = super().route(*arguments, **options)
        self.chosen.append(routing.experts)
        return routing


class CpuWithGivenExperts(CpuBackend):
    """The CPU's kernels, each row of layer i with its experts in `chosen[i]`, [positions, k].

    Between experts that are all but equal a cache in fp16 may tip the choice, which says nothing of the kernels.
    """

    def __init__(self, chosen: list[Tensor]) -> None:
        super().__init__(1)
        self._chosen = cycle(chosen)

    def route(self, batch: ForwardBatch, *arguments: Any) -> Routing:  # type: ignore[override]
        return super().route(batch, *arguments, next(self._chosen)[batch.positions])


@dataclass(frozen=True)
class ReferenceRun:
    """difference: of the reference backend's logits to those of `transformers`. chosen: the experts of each token
    [TOKENS, k], a tensor for each layer with experts."""

    difference: float
    chosen: list[Tensor]


@cache
def reference_run(root: Path, name: str, kind: str, vocab: int) -> ReferenceRun:
    backend = ChoosingReference()
    logits = our_logits(opened(root, name, kind), vocab, backend)
    return ReferenceRun(nmse(logits, torch.load(root / f"{name}.pt")), backend.chosen)


def cpu_difference(root: Path, name: str, kind: str, case: Case, decode: bool) -> float:
    """Of the logits of the CPU's kernels, operation by operation: a prompt of 40 tokens, or of 20, then one by one.

    Rows of a mixture of experts have those that the reference backend chooses.
    """
    checkpoint, ids = opened(root, name, kind), token_ids(case.vocab)
    backend = CpuBackend(1)
    if checkpoint.config.experts is not None:
        backend = CpuWithGivenExperts(reference_run(root, name, kind, case.vocab).chosen)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, 64, 64)
    cache = KVCache.allocate(checkpoint.config, 64, torch.device("cpu")).layers
    cuts = [0, 20, *range(21, TOKENS + 1)] if decode else [0, TOKENS]
    rows = [forward(decoder, ids[a:b], cache, a, all_logits=True) for a, b in pairwise(cuts)]
    return nmse(torch.cat(rows).double(), torch.load(root / f"{name}.pt"))


def engine_difference(root: Path, name: str, kind: str, case: Case, decode: bool) -> float:
    """The same of the whole engine on the CPU, in chunks of 16 tokens, or token by token."""
    path = path_of(root, name, kind)
    with LLM(path, device="cpu", threads=1, ctx_size=64, chunk_size=16) as llm:
        logits = llm.logits(token_ids(case.vocab).tolist(), decode=decode)
    return nmse(logits.double(), torch.load(root / f"{name}.pt"))


class SameLogits:
    """The logits of every file of a module's CASES are those of `transformers`. A module derives its test class.

    main: the cases that the whole engine runs too, of every kind of `engine_kinds`. The CPU's kernels compute every
    kind of those, and of the others the folder and the GGUF file.
    """

    main: ClassVar[Sequence[str]] = ("plain",)
    engine_kinds: ClassVar[Sequence[str]] = KINDS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        cases: dict[str, Case] = metafunc.module.CASES
        every = [(name, kind) for name, case in cases.items() for kind in case.kinds]
        files = {
            "file": every,
            "cpu_file": [(name, kind) for name, kind in every if name in self.main or kind in KINDS],
            "engine_file": [(name, kind) for name in self.main for kind in self.engine_kinds],
        }
        for argument, found in files.items():
            if argument in metafunc.fixturenames:
                values = [pytest.param(file, cases[file[0]], id="-".join(file)) for file in found]
                metafunc.parametrize((argument, "case"), values)

    def test_the_reference_backend_has_them(self, root: Path, file: tuple[str, str], case: Case) -> None:
        assert reference_run(root, *file, case.vocab).difference < TOLERANCE

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_the_cpus_kernels_compute_them(
        self, root: Path, cpu_file: tuple[str, str], case: Case, decode: bool
    ) -> None:
        assert cpu_difference(root, *cpu_file, case, decode) < CPU_TOLERANCE

    @pytest.mark.parametrize("decode", [False, True], ids=["prefill", "decode"])
    def test_the_engine_computes_them_on_the_cpu(
        self, root: Path, engine_file: tuple[str, str], case: Case, decode: bool
    ) -> None:
        assert engine_difference(root, *engine_file, case, decode) < CPU_TOLERANCE
