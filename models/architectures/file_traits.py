"""What files of several architectures say alike: traits that GGUF tells by tensors or by keys common to a few."""

from dataclasses import replace

from quengine.models.architectures.architecture import Fields
from quengine.models.config import BlockKind, ModelConfig
from quengine.models.gguf import GGUFFile

DRAFTS = "nextn_predict_layers"
"""Key of GGUF: the layers at a file's end that only draft tokens."""

_BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"})
_NORMS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})


def tensor_kinds(file: GGUFFile) -> frozenset[str]:
    """The names of a file's tensors, below their layers."""
    return frozenset(name.split(".", 2)[-1] for name in file.tensors)


def with_biases(block: BlockKind, kinds: frozenset[str], of_output: bool = False) -> BlockKind:
    """`block` with biases of query, key and value, and `of_output`, where a file of tensors `kinds` has them."""
    output = of_output and "attn_output.bias" in kinds
    return replace(block, qkv_bias=not kinds.isdisjoint(_BIASES), output_bias=output)


def has_head_norms(kinds: frozenset[str]) -> bool:
    """Whether queries or keys have a norm in a file of tensors `kinds`."""
    return not kinds.isdisjoint(_NORMS)


def without_drafts(file: GGUFFile, config: ModelConfig) -> Fields:
    """The layers that a file counts include those that draft. Raises GGUFError where they are all."""
    drafts = file.get_int(f"{config.architecture}.{DRAFTS}", 0, config.block_count - 1) or 0
    return {"block_count": config.block_count - drafts, "draft_layers": drafts}
