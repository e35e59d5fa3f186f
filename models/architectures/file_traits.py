"""Traits that files of several architectures give alike, in GGUF by tensors or by keys that a few of them share."""

from collections.abc import Mapping

from quengine.models.architectures.architecture import Fields, Keys
from quengine.models.blocks import BlockForm
from quengine.models.blocks.mamba2 import Mamba2Sizes
from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFFile
from quengine.models.hf.hf_keys import flag

DRAFTS = "nextn_predict_layers"
"""Key of GGUF: the layers at a file's end that only draft tokens."""

MAMBA2: Mapping[str, str] = {
    "heads": "ssm.time_step_rank",
    "inner": "ssm.inner_size",
    "groups": "ssm.group_count",
    "state_dim": "ssm.state_size",
    "taps": "ssm.conv_kernel",
}
"""Keys of GGUF: the sizes of Mamba2 layers."""

_BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias", "attn_qkv.bias"})
_NORMS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})


def tensor_kinds(file: GGUFFile) -> frozenset[str]:
    """The names of a file's tensors below their layers, such as "attn_q.weight"."""
    return frozenset(name.split(".", 2)[-1] for name in file.tensors)


def with_biases(block: BlockForm, kinds: frozenset[str]) -> BlockForm:
    """`block` with biases of query, key and value where a file of tensors `kinds` has them."""
    return block.with_attention(qkv_bias=not kinds.isdisjoint(_BIASES))


def gguf_attention_biases(file: GGUFFile, config: ModelConfig) -> Fields:
    """Biases of all projections of attention where the file has them."""
    kinds = tensor_kinds(file)
    block = with_biases(config.block, kinds)
    return {"block": block.with_attention(output_bias="attn_output.bias" in kinds)}


def attention_biases(keys: Keys, config: ModelConfig) -> Fields:
    """As `gguf_attention_biases`, for a folder: `attention_bias` covers all projections. Raises EngineError."""
    biases = flag(keys, "attention_bias")
    return {"block": config.block.with_attention(qkv_bias=biases, output_bias=biases)}


def has_head_norms(kinds: frozenset[str]) -> bool:
    """Whether queries or keys have a norm in a file of tensors `kinds`."""
    return not kinds.isdisjoint(_NORMS)


def without_drafts(file: GGUFFile, config: ModelConfig) -> Fields:
    """`draft_layers`, and `block_count` less these, which a file counts too. Raises GGUFError if none would be left."""
    drafts = file.get_int(f"{config.architecture}.{DRAFTS}", 0, config.block_count - 1) or 0
    return {"block_count": config.block_count - drafts, "draft_layers": drafts}


def mamba2_sizes(file: GGUFFile, config: ModelConfig) -> Mamba2Sizes:
    """The sizes of a file's Mamba2 layers. Raises GGUFError where one is missing or heads do not share the channels."""
    prefix = config.architecture
    sizes = {field: file.require_int(f"{prefix}.{key}", 1, 1 << 20) for field, key in MAMBA2.items()}
    head_dim, rest = divmod(sizes["inner"], sizes["heads"])
    if rest:
        problem = f"is not a multiple of the {sizes['heads']} heads (ssm.time_step_rank)"
        raise file.error(f"{prefix}.{MAMBA2['inner']}", problem)
    conv_bias = "ssm_conv1d.bias" in tensor_kinds(file)
    return Mamba2Sizes(
        heads=sizes["heads"],
        head_dim=head_dim,
        groups=sizes["groups"],
        state_dim=sizes["state_dim"],
        taps=sizes["taps"],
        eps=config.rms_eps,
        conv_bias=conv_bias,
    )


def counts_by_layer(file: GGUFFile, key: str, config: ModelConfig) -> list[int]:
    """The numbers at `key` by layer; a single one counts for all. Raises GGUFError where they are not one per layer."""
    name = f"{config.architecture}.{key}"
    if isinstance(file.metadata.get(name), int):
        return [file.require_int(name)] * config.block_count
    counts = file.get_ints(name)
    if counts is None or len(counts) != config.block_count:
        found = "is missing" if counts is None else f"has {len(counts)} numbers"
        raise file.error(name, f"{found} for {config.block_count} layers")
    return [int(count) for count in counts]
