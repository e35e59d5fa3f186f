"""Models of an architecture as Hugging Face folders and as the GGUF files that llama.cpp's converter makes of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quengine import LLM
from quengine.kernels.cpu.backend import CpuBackend
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

FILES = {"folder": "", "gguf": ".gguf", "fused folder": "-fused", "old gguf": "-old.gguf"}
"""Kind -> what a model's name ends with. The last two hold experts in the other form: a folder all of a layer in one
tensor, as `transformers` 5 may save them, and a file each in its own, as llama.cpp's first converters wrote them."""

KINDS = ("folder", "gguf")
MIXTURE_KINDS = tuple(FILES)


@dataclass(frozen=True)
class Case:
    """A model for `write_model`. `tokenizer` is the class that tokenizer_config.json names, "" for SentencePiece.

    converts: the converter writes all of it; where not, there is only the folder.
    mixture: of experts, written in every form. change: alters the weights of the `transformers` model. edit: the folder
    before anything reads it.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    vision: bool = False
    tokenizer: str = "PreTrainedTokenizerFast"
    converts: bool = True
    mixture: bool = False
    change: Callable[[Any], None] | None = None
    edit: Callable[[Path], Any] | None = None

    @property
    def kinds(self) -> list[str]:
        kinds = MIXTURE_KINDS if self.mixture else KINDS
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
        if case.mixture:
            write_model(path_of(root, name, "fused folder"), case.model_type, fused=True, **options)
        if case.edit is not None:
            case.edit(folder)
        torch.save(transformers_logits(folder, case.vocab), root / f"{name}.pt")
        if case.tokenizer:
            write_tokenizer(folder, case.tokenizer)
        else:
            write_sentencepiece(folder)
        if case.converts:
            jobs.append(Conversion(folder, root / f"{name}.gguf", "llama-bpe"))
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


def of_kind(cases: dict[str, Case]) -> list[tuple[str, str]]:
    """(name, kind) of every file."""
    return [(name, kind) for name, case in cases.items() for kind in case.kinds]


def path_of(root: Path, name: str, kind: str) -> Path:
    return root / f"{name}{FILES[kind]}"


def opened(root: Path, name: str, kind: str) -> Checkpoint:
    return open_checkpoint(path_of(root, name, kind))


def difference(root: Path, name: str, kind: str, case: Case) -> float:
    """Of the reference backend's logits to those of `transformers`."""
    return nmse(our_logits(opened(root, name, kind), case.vocab), torch.load(root / f"{name}.pt"))


def cpu_difference(root: Path, name: str, kind: str, case: Case, decode: bool) -> float:
    """The same of the CPU's kernels, operation by operation: a prompt of 40 tokens, or of 20, then token by token."""
    checkpoint, ids = opened(root, name, kind), token_ids(case.vocab)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, CpuBackend(1), 64, 64)
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
