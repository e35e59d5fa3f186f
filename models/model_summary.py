"""Descriptions of models on disk, read from their headers alone, for commands that show a model without loading it.

They also cover models that this engine cannot run, with the reason, and files with a vocabulary but no tensors.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

from quengine.errors import EngineError
from quengine.kernels.kv.cache_types import CACHE_TYPES, refusal
from quengine.models.architectures import attentions_of
from quengine.models.blocks.latent_attention import LatentAttention
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, GGUFFile, StringArray, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.gguf.errors import shown
from quengine.models.gguf.vocab_checks import CHAT_TEMPLATE, MERGES, TOKENS, check_vocabulary
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.parameter_counts import ParameterCounts, count_parameters
from quengine.models.tensor_table import check_tensors, draft_tensors

_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer, or of an expert
_OF_ONE_EXPERT = re.compile(r"\.(?:experts|ffn_gate|ffn_up|ffn_down)\.\d+\.")


@dataclass(frozen=True)
class TensorRow:
    """One stored tensor; `shape` is rows first."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass
class TensorGroup:
    """The tensors with the same role and type: every layer's `ffn_down.weight` in Q6_K, for example."""

    name: str
    type: str
    count: int = 0
    parameters: int = 0
    nbytes: int = 0


@dataclass(frozen=True)
class TokenizerSummary:
    """The tokenizer of a GGUF file. `problem` says what is wrong with its arrays; None if nothing."""

    model: str
    pre: str | None
    tokens: int
    merges: int
    special: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    add_bos: bool | None = None
    problem: str | None = None


@dataclass(frozen=True)
class ModelSummary:
    """A model's description. `problem`: why this engine cannot run it; None if it can. `drafts`: names of the
    tensors of draft layers, which the decoder ignores.
    """

    path: Path
    files: tuple[Path, ...]
    file_format: str
    architecture: str
    name: str
    nbytes: int
    config: ModelConfig | None
    tensors: tuple[TensorRow, ...]
    tokenizer: TokenizerSummary | None
    templates: Mapping[str, str]
    problem: str | None
    drafts: frozenset[str] = frozenset()

    @property
    def computed(self) -> list[TensorRow]:
        """The tensors, without those of draft layers."""
        return [row for row in self.tensors if row.name not in self.drafts]

    @cached_property
    def counts(self) -> ParameterCounts:
        """The parameter counts, with bytes as stored."""
        return count_parameters(((row.name, row.shape, row.nbytes) for row in self.computed), self.config)

    @property
    def parameters(self) -> int:
        return self.counts.parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return self.counts.nbytes

    def limits(self) -> list[str]:
        """Options that this model does not support, each with the reason, one line each."""
        config = self.config
        if config is None or not self.tensors:
            return []
        found = []
        rows = sorted({(a.head_dim, isinstance(a, LatentAttention)) for a in attentions_of(config)})
        for cache_type in CACHE_TYPES:
            if reasons := [why for size, latent in rows if (why := refusal(cache_type, size, latent))]:
                found.append(f"--cache-type {cache_type}: it needs {reasons[0]}")
        alone = next((row.name for row in self.computed if _OF_ONE_EXPERT.search(row.name)), None)
        if config.experts is not None and alone is not None:
            found.append(f"--expert-parallel: each expert is in a tensor of its own, as {shown(alone)}")
        return found

    def groups(self) -> list[TensorGroup]:
        """Tensors by role and type, over all layers and experts, in the order of their first occurrence in the file."""
        found: dict[tuple[str, str], TensorGroup] = {}
        for row in self.tensors:
            name = _INDEX.sub("*", row.name)
            group = found.setdefault((name, row.type), TensorGroup(name, row.type))
            group.count += 1
            group.parameters += prod(row.shape)
            group.nbytes += row.nbytes
        return list(found.values())


def summarize(path: Path) -> ModelSummary:
    """Describes the GGUF file, or Hugging Face checkpoint folder, at `path`.

    Raises EngineError if it cannot be read at all; if it can be read but not run, `problem` says why.
    """
    if path.is_dir():
        return _summarize_folder(path)
    with open_gguf(path) as file:
        return _summarize_gguf(path, file)


def _summarize_gguf(path: Path, file: GGUFFile) -> ModelSummary:
    config, problem = None, None
    try:
        config = read_gguf_config(file)
        if file.tensors:
            check_tensors(file, config)
        else:
            problem = "no tensors: a vocabulary only, which tokenizes but does not generate"
    except EngineError as error:
        problem = str(error)
    rows = tuple(TensorRow(t.name, t.type_name, t.shape, t.nbytes) for t in file.tensors.values())
    return ModelSummary(
        path=path,
        files=file.shards,
        file_format=f"GGUF v{file.version}",
        architecture=_text(file, "general.architecture") or "unknown",
        name=_text(file, "general.name") or "",
        nbytes=file.nbytes,
        config=config,
        tensors=rows,
        tokenizer=_summarize_tokenizer(file),
        templates=_templates(file),
        problem=problem,
        drafts=draft_tensors(config, file.tensors) if config else frozenset(),
    )


def _summarize_tokenizer(file: GGUFFile) -> TokenizerSummary | None:
    tokens, merges = file.metadata.get(TOKENS), file.metadata.get(MERGES)
    if tokens is None:
        return None
    problem = None
    special: dict[str, tuple[int, str]] = {}
    add_bos = None
    try:
        check_vocabulary(file)
        file.require_str("tokenizer.ggml.model")
        add_bos = file.get_bool("tokenizer.ggml.add_bos_token")
        tokens = file.require_strings(TOKENS)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            token = file.get_int(f"tokenizer.ggml.{name}_token_id", 0, (1 << 32) - 1)
            if token is not None and token < len(tokens):
                special[name] = (token, tokens[token])
    except GGUFError as error:
        problem = str(error)
    return TokenizerSummary(
        model=_text(file, "tokenizer.ggml.model") or "unknown",
        pre=_text(file, "tokenizer.ggml.pre"),
        tokens=len(tokens) if isinstance(tokens, StringArray) else 0,
        merges=len(merges) if isinstance(merges, StringArray) else 0,
        special=special,
        add_bos=add_bos,
        problem=problem,
    )


def _text(file: GGUFFile, key: str) -> str | None:
    """The string at `key`; None if there is none or it is of another type."""
    value = file.metadata.get(key)
    return value if isinstance(value, str) else None


def _templates(file: GGUFFile) -> dict[str, str]:
    """Chat templates by name, the unnamed one as "default"."""
    found = {}
    for key in file.metadata:
        if key == CHAT_TEMPLATE or key.startswith(CHAT_TEMPLATE + "."):
            found[key[len(CHAT_TEMPLATE) + 1 :] or "default"] = _text(file, key) or ""
    return found


def _summarize_folder(path: Path) -> ModelSummary:
    from quengine.models.hf.hf_headers import read_config, read_templates, safetensors_rows

    raw = read_config(path)
    config, problem = None, None
    try:
        config = read_hf_config(raw)
    except EngineError as error:
        problem = str(error)
    files, rows = safetensors_rows(path)
    return ModelSummary(
        path=path,
        files=files,
        file_format="safetensors",
        architecture=config.architecture if config else str(raw.get("model_type", "unknown")),
        name=path.name,
        nbytes=sum(file.stat().st_size for file in files),
        config=config,
        tensors=tuple(TensorRow(*row) for row in rows),
        tokenizer=None,
        templates=read_templates(path),
        problem=problem,
        drafts=draft_tensors(config, [row[0] for row in rows], "model.layers.") if config else frozenset(),
    )
