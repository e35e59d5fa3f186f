"""Two files as the sides of a comparison: whether they can be compared at all, and which of their tensors differ.

A wrong bit in one weight of a large model changes the logits by less than rounding does; only the bytes show it.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from quengine.diagnostics.harness import opened
from quengine.errors import EngineError
from quengine.kernels.quant_tensor import QuantTensor
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig
from quengine.models.tokenizer import Tokenizer

SHAPE = (
    "architecture",
    "vocab_size",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "head_count",
    "head_count_kv",
    "head_dim",
    "layer_sizes",
    "experts.count",
    "experts.feed_forward_length",
    "experts.shared_feed_forward_length",
    "experts.dense_layers",
)
"""The fields that must be equal in two models, so that each operation of one has its counterpart in the other."""

ARITHMETIC = (
    "rope_dim",
    "rope_freq_base",
    "rope_freq_base_swa",
    "rope_scaling",
    "rms_eps",
    "block",
    "sliding_window",
    "full_attention_layers",
    "attention_scale",
    "embedding_scale",
    "logit_scale",
    "attention_temperature_scale",
    "attention_temperature_length",
    "experts.router",
)
"""The other fields of a configuration that change the logits."""

_BYTES_AT_ONCE = 1 << 26
_SHOWN_VALUE = 80


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of the same type in both files whose bytes differ: the number of differing blocks, and the first row
    with one."""

    name: str
    type_name: str
    differing: int
    blocks: int
    first_row: int

    def __str__(self) -> str:
        share = f"{self.differing} of {self.blocks} blocks"
        return f"{self.name} ({self.type_name}): {share}, the first in row {self.first_row}"


@dataclass(frozen=True)
class FileComparison:
    """The tensors of two models, as stored.

    differing: those of one type whose bytes are not the same.
    retyped: the number stored as another type, or in one of the files only; their values are not compared.
    settings: what differs of the configuration, a phrase each: "rms_eps is 1e-05 in a and 1e-06 in b".
    """

    tensors: int
    differing: list[TensorDifference]
    retyped: int
    settings: list[str]

    @property
    def failures(self) -> list[str]:
        """A phrase for each reason why the files are not the same model; empty where they are."""
        found = [f"files: {setting}" for setting in self.settings]
        if self.differing:
            found.append(f"files: {len(self.differing)} of {self.tensors} tensors have other bytes")
        return found


def compare_files(a: str | Path, b: str | Path) -> FileComparison:
    """What differs between two models as they are stored, GGUF files or folders of safetensors.

    Raises:
        EngineError: a file is no model, or the shapes or vocabularies differ, so that nothing can be compared.
    """
    with opened(a) as first, opened(b) as second:
        _check_shapes(first.config, second.config)
        _check_vocabularies(first.tokenizer(), second.tokenizer())
        return _compared(first, second)


def _check_shapes(a: ModelConfig, b: ModelConfig) -> None:
    for name in SHAPE:
        of_a, of_b = _value(a, name), _value(b, name)
        if of_a != of_b:
            raise EngineError(
                f"the two files cannot be compared: {name} is {of_a} in a and {of_b} in b; both must be the same model"
            )


def _value(config: ModelConfig, name: str) -> object:
    """The field of that name, or that of its experts; None for a model without experts."""
    outer, _, inner = name.rpartition(".")
    return getattr(getattr(config, outer) if outer else config, inner, None)


def _check_vocabularies(a: Tokenizer, b: Tokenizer) -> None:
    if a.vocab_size != b.vocab_size:
        raise EngineError(f"the vocabularies differ: {a.vocab_size} tokens in a and {b.vocab_size} in b")
    for token in range(a.vocab_size):
        of_a, of_b = a.token_text(token), b.token_text(token)
        if of_a != of_b:
            raise EngineError(f"the vocabularies differ: token {token} is {of_a!r} in a and {of_b!r} in b")


def _compared(a: Checkpoint, b: Checkpoint) -> FileComparison:
    tensors_a, tensors_b = a.tensors, b.tensors
    differing, shared = [], 0
    for name in (name for name in tensors_a if name in tensors_b):  # in the file's order
        one, other = tensors_a[name], tensors_b[name]
        if one.format.name == other.format.name and one.shape == other.shape:
            shared += 1
            if difference := _difference(one, other):
                differing.append(difference)
    count = len(tensors_a.keys() | tensors_b.keys())
    return FileComparison(count, differing, count - shared, _settings(a.config, b.config))


def _difference(a: QuantTensor, b: QuantTensor) -> TensorDifference | None:
    """Compare two tensors block by block, some rows at a time: the files are mapped and need not fit into memory."""
    blocks = differing = 0
    first_row = -1
    at_once = max(1, _BYTES_AT_ONCE // a.data.shape[1])
    size = a.format.nbytes
    for start in range(0, a.rows, at_once):
        rows_a, rows_b = a.data[start : start + at_once], b.data[start : start + at_once]
        blocks += rows_a.numel() // size
        if torch.equal(rows_a, rows_b):
            continue
        wrong = (rows_a != rows_b).view(len(rows_a), -1, size).any(dim=2)
        differing += int(wrong.sum())
        if first_row < 0:
            first_row = start + int(wrong.any(dim=1).nonzero()[0])
    return TensorDifference(a.name, a.format.name, differing, blocks, first_row) if differing else None


def _settings(a: ModelConfig, b: ModelConfig) -> list[str]:
    values = ((name, str(_value(a, name)), str(_value(b, name))) for name in ARITHMETIC)
    return [
        f"{name} is {of_a[:_SHOWN_VALUE]} in a and {of_b[:_SHOWN_VALUE]} in b"
        for name, of_a, of_b in values
        if of_a != of_b
    ]
