"""Parameter counts and bytes of a model: of all tensors, and of those that compute one token.

In a mixture of experts, a token is computed by a few experts per layer. Counted from names and shapes alone, for both
file formats, without torch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig

_EXPERTS = re.compile(
    r"^blk\.\d+\.ffn_\w+_exps\.|^blk\.\d+\.ffn_(gate|up|down)\.\d+\."  # GGUF, of all experts and of one
    r"|\.experts\.|\.block_sparse_moe\.(input|output)_linear\."  # Hugging Face; the second is Granite's
)
"""Names of tensors with matrices or biases of experts, except the shared expert's and the router's."""

_EMBEDDING = re.compile(r"^token_embd\.weight$|(^|\.)(embed_tokens|token_embeddings)\.weight$")

_TABLE = re.compile(r"^per_layer_token_embd\.weight$|(^|\.)embed_tokens_per_layer\.weight$")


def count_text(parameters: int) -> str:
    """A number of parameters, formatted: 30.53 B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return str(parameters)


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of a model, and their bytes.

    parameters, nbytes: of all tensors.
    active_parameters: those that compute a token, embedding and output included.
    active_bytes: bytes of the weights that a token reads. Only one row counts of a table by layer, and of an embedding
        that is not the output matrix.
    """

    parameters: int
    active_parameters: int
    nbytes: int
    active_bytes: int


def count_parameters(
    tensors: Iterable[tuple[str, tuple[int, ...], int]], config: ModelConfig | None
) -> ParameterCounts:
    """Counts tensors, given as name, shape and bytes. Without a configuration all of them are taken as active."""
    experts = None if config is None else config.experts
    tied = config is None or config.tied_output
    parameters = active_parameters = nbytes = active_bytes = 0
    for name, shape, size in tensors:
        count, read = prod(shape), size
        parameters, nbytes = parameters + count, nbytes + size
        if experts is not None and _EXPERTS.search(name):
            count = count * experts.router.used // experts.count
            read = read * experts.router.used // experts.count
        elif _TABLE.search(name) or (_EMBEDDING.search(name) and not tied):
            read //= shape[0]
        active_parameters, active_bytes = active_parameters + count, active_bytes + read
    return ParameterCounts(parameters, active_parameters, nbytes, active_bytes)


def checkpoint_parameters(checkpoint: Checkpoint) -> ParameterCounts:
    """The counts of an opened model."""
    tensors = ((name, tensor.shape, tensor.nbytes) for name, tensor in checkpoint.tensors.items())
    return count_parameters(tensors, checkpoint.config)
