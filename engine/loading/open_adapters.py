"""The LoRA adapters that a model is loaded with: their files, and their changes by tensor."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.kernels.lora.low_rank import Adapters, padded_rank
from quengine.models.checkpoint import Checkpoint
from quengine.models.lora.adapter import Adapter, parse_lora
from quengine.models.lora.open_adapter import open_adapter
from quengine.models.split_checkpoint import SplitCheckpoint
from quengine.models.tensor_table import holder_of, tensor_specs
from quengine.request.adapter_scales import NO_ADAPTERS, AdapterScales, LoadedAdapter

_REFUSED = ("inp_gate", "ssm_ba")
"""Parts of the names of matrices that backends multiply in a way of their own, or whose rows they reorder."""


@dataclass(frozen=True)
class OpenAdapters:
    """The adapters of a model. scales: the scales of a request. weights: the changes by tensor; None: there are no
    adapters. files: the adapters' files."""

    scales: AdapterScales = NO_ADAPTERS
    weights: Adapters | None = None
    files: tuple[Adapter, ...] = ()

    def nbytes(self, chunk: int) -> int:
        """Bytes of memory that the adapters take, with a prompt's chunk of `chunk` tokens.

        The weights are in fp32, or twice in 16 bits (two orders). Every adapter of a matrix takes the rank of the
        largest one. The products of a chunk are A x of query, key and value, and gate and up with their activation:
        with adapters these are not computed in one operation.
        """
        if self.weights is None:
            return 0
        held = ranks = widest = 0
        for name, each in self.weights.changes.items():
            rank = padded_rank(each) * len(each)
            rows, cols = next((len(c.b), c.a.shape[1]) for c in each if c is not None)
            held += rank * (rows + cols)
            ranks = max(ranks, rank)
            widest = max(widest, rows if "blk." in name else 0)
        return 4 * (held + 3 * chunk * (widest + ranks))

    @property
    def notes(self) -> list[str]:
        """A line for the user about each adapter."""
        return [
            f"adapter {adapter.id}: {adapter.name}, scale {adapter.scale:g}, {len(file.changes)} matrices"
            for adapter, file in zip(self.scales.adapters, self.files, strict=True)
        ]

    def of_part(self, part: Checkpoint) -> "OpenAdapters":
        """The adapters of a rank that holds this part of the model."""
        if not isinstance(part, SplitCheckpoint) or not self.files:
            return self
        return replace(self, weights=adapters_of(part, [part.changes(file.changes) for file in self.files]))

    def check_taken(self, missing: Collection[str]) -> None:
        """Raises EngineError if an adapter changes one of the `missing` tensors, for which no layer takes changes."""
        _check(self.files, missing.__contains__)


NONE_OPEN = OpenAdapters()


def open_adapters(config: EngineConfig, checkpoint: Checkpoint) -> OpenAdapters:
    """The adapters of `config.lora`, checked against the model.

    Raises:
        EngineError: an adapter is missing, is of another model, or changes a tensor for which that is not implemented;
            or the model is an encoder, or has alternating updates.
    """
    if not config.lora:
        return NONE_OPEN
    shape, given = checkpoint.config, [parse_lora(str(text)) for text in config.lora]
    why = {
        "an encoder": shape.encoder is not None,
        "a model with alternating updates": shape.altup is not None,
    }
    for what, is_so in why.items():
        if is_so:
            raise EngineError(
                f"lora {given[0][0]}: adapters of {what} ({shape.architecture}) are not implemented"
            )
    files = tuple(open_adapter(path, shape) for path, _ in given)
    _check(files, lambda name: name.split(".")[-2] in _REFUSED or "_exps." in name)
    loaded = tuple(
        LoadedAdapter(number, file.name, str(file.path), scale)
        for number, (file, (_, scale)) in enumerate(zip(files, given, strict=True))
    )
    scales = AdapterScales(loaded, config.deterministic)
    return OpenAdapters(scales, adapters_of(checkpoint, [file.changes for file in files]), files)


def _check(files: Iterable[Adapter], refused: Callable[[str], bool]) -> None:
    """Raises EngineError where a file changes a refused tensor."""
    for file in files:
        for name in filter(refused, file.changes):
            raise EngineError(
                f"adapter {file.path}: {name}: a change of this tensor is not implemented beside its weights; merge "
                "the adapter into its model (engine merge)"
            )


def adapters_of(checkpoint: Checkpoint, files: Sequence[Mapping[str, LowRank]]) -> Adapters:
    """The changes of a model, or of a rank's part, by adapter."""
    changes: dict[str, list[LowRank | None]] = {}
    for number, of_file in enumerate(files):
        for name, change in of_file.items():
            changes.setdefault(name, [None] * len(files))[number] = change
    joined: dict[str, list[tuple[str, int]]] = {}
    for name, spec in tensor_specs(checkpoint.config).items():
        holder = holder_of(name)
        below = holder.endswith(".attn_qkv.weight")  # others hold their parts in another order
        if holder != name and below and name not in checkpoint.tensors and holder in checkpoint.tensors:
            joined.setdefault(holder, []).append((name, spec.shape[-2]))
    tied = checkpoint.config.tied_output and "output.weight" not in checkpoint.tensors
    return Adapters(len(files), changes, joined, tied)
