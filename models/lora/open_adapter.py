"""Opens a LoRA adapter of a model: a GGUF file or a folder of PEFT."""

from collections.abc import Mapping
from pathlib import Path

import torch

from quengine.errors import EngineError
from quengine.kernels.lora.change import LowRank
from quengine.models.config import ModelConfig
from quengine.models.gguf.file import open_gguf
from quengine.models.lora.adapter import Adapter
from quengine.models.lora.gguf_adapter import check_adapter, read_changes
from quengine.models.lora.peft import CONFIG, PeftAdapter, in_tiled_order, is_peft
from quengine.models.tensor_table import adapted_specs, holder_of, joined_specs, tensor_specs


def open_adapter(path: Path, config: ModelConfig) -> Adapter:
    """The adapter at `path` for a model of this configuration, whose tensors are in GGUF's order.

    Raises:
        EngineError: there is none, it is of another model, or has something that is not computed: activated LoRA, DoRA,
            trained biases, whole matrices, tensors that the model has not, shapes that do not fit, a scale that is
            not finite.
    """
    tiled = config.gated_delta is not None and config.gated_delta.tiled
    if is_peft(path):
        name, changes = path.resolve().name, PeftAdapter(path).changes(config, file_order=tiled)
    elif path.is_dir():
        raise EngineError(f"{path}: no adapter: there is no {CONFIG}")
    else:
        with open_gguf(path) as file:
            name = file.get_str("general.name") or path.stem
            changes = read_changes(file, check_adapter(file, config))
        if not tiled:
            changes = {each: in_tiled_order(config, each, c, back=True) for each, c in changes.items()}
    if not changes:
        raise EngineError(f"{path}: an adapter that changes nothing: it has no tensors")
    return Adapter(name, path, _of_declared(config, changes))


def _of_declared(config: ModelConfig, changes: Mapping[str, LowRank]) -> dict[str, LowRank]:
    """The changes by declared tensor; some files have the changes of several tensors in one."""
    specs, joined, found = adapted_specs(config), joined_specs(config), dict[str, LowRank]()
    for name, change in changes.items():
        if name not in joined or name in tensor_specs(config):
            found[name] = change
            continue
        parts = [each for each in specs if each != name and holder_of(each) == name]
        if name.endswith("attn_kv_b.weight"):
            found |= of_latent(config, name, change)
            continue
        rows = [specs[each].shape[-2] for each in parts]
        if name.endswith("ssm_in.weight") or sum(rows) != joined[name].shape[-2]:
            raise EngineError(f"{name}: a change of this tensor, which holds several, is not implemented")
        for each, b in zip(parts, torch.split(change.b, rows, dim=-2), strict=True):
            found[each] = change._replace(b=b.contiguous())
    return found


def of_latent(config: ModelConfig, name: str, change: LowRank) -> dict[str, LowRank]:
    """A change of attn_kv_b as changes of attn_k_b, transposed, and attn_v_b."""
    sizes = config.latent
    assert sizes is not None
    heads, rank = config.head_count, change.rank
    of_heads = change.b.view(heads, sizes.plain + sizes.values, rank)
    a = change.a.expand(heads, *change.a.shape)
    keys = LowRank(of_heads[:, : sizes.plain].transpose(1, 2).contiguous(), a.transpose(1, 2), change.scale)
    values = LowRank(a, of_heads[:, sizes.plain :].contiguous(), change.scale)
    return {name.replace("kv_b", "k_b"): keys, name.replace("kv_b", "v_b"): values}
