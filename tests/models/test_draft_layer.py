"""The layer that drafts tokens: its logits are those of `transformers`' own layer on the joined rows, in both files."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from quengine.kernels.backend import Backend
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.forward_batch import decode_batch, prefill_batch
from quengine.kernels.kv.cache_types import BLOCK_SIZE, blocks_for
from quengine.kernels.reference import ReferenceBackend
from quengine.kv_cache import KVCache
from quengine.models.checkpoint import open_checkpoint
from quengine.models.decoder import Decoder
from quengine.models.draft_checkpoint import DraftLayer
from quengine.models.draft_decoder import DraftDecoder
from tests.llama_cpp_convert import Conversion, convert, write_tokenizer
from tests.models.architectures.test_glm4moe import SIZES as GLM
from tests.models.architectures.test_glm4moe import add_draft_layer
from tests.models.architectures.test_qwen3_next import MOE, SIZES, remember, with_draft_layer
from tests.transformers_models import (
    TOKENS,
    edit_tensors,
    nmse,
    token_ids,
    transformers_model,
    write_model,
)

CONTEXT = 64
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen35": ("qwen3_5_text", SIZES, "mtp.layers.0."),
    "qwen35moe": ("qwen3_5_moe_text", MOE, "mtp.layers.0."),
    "qwen3next": ("qwen3_next", MOE, "mtp.layers.0."),
    "glm4moe": ("glm4_moe", {**GLM, "use_qk_norm": True}, "model.layers.3."),
}
"""Architecture -> the `transformers` model, its sizes, what names of the layer's tensors begin with."""
BESIDE = {
    "mtp.layers.0.": ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "model.layers.3.": tuple(
        f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    ),
}


def draw_anew(tensors: dict[str, Tensor]) -> None:
    """The layer that drafts is not like another, and its projection does not make rows of the size of noise."""
    random = torch.Generator().manual_seed(8)
    for name, tensor in tensors.items():
        if name.startswith(("mtp.", "model.layers.3.")):
            scale = 0.12 if tensor.ndim > 1 else 0.2
            drawn = torch.randn(tensor.shape, generator=random, dtype=torch.float32) * scale
            tensors[name] = drawn + (1.0 if tensor.ndim == 1 and not name.startswith("mtp.") else 0.0)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME, a folder, and NAME.gguf, by llama.cpp's converter."""
    found = tmp_path_factory.mktemp("draft_layers")
    torch.set_num_threads(1)
    for name, (model_type, sizes, _) in MODELS.items():
        write_model(found / name, model_type, vocab=512, change=remember, **sizes)
        (add_draft_layer if name == "glm4moe" else with_draft_layer)(found / name)
        edit_tensors(found / name, draw_anew)
        write_tokenizer(found / name, "PreTrainedTokenizerFast")
    convert([Conversion(found / name, found / f"{name}.gguf", "llama-bpe", drafts=True) for name in MODELS])
    return found


def expected(folder: Path, name: str) -> Tensor:
    """In float64: logits [TOKENS, vocab] of a model of one layer, the one that drafts, on the joined rows."""
    import transformers

    model, _ = transformers_model(folder)
    ids = token_ids(512)[None]
    stored = {key: tensor.double() for key, tensor in load_file(folder / "model.safetensors").items()}
    begin = MODELS[name][2]
    projection, enorm, hnorm, head_norm = (stored[f"{key}.weight"] for key in BESIDE[begin])
    config = deepcopy(model.config.get_text_config())
    config.num_hidden_layers, config.mlp_only_layers = 1, []
    if name == "glm4moe":
        config.first_k_dense_replace = 0
    else:
        config.layer_types = ["full_attention"]
    layer = (
        transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double().eval()
    )
    own = {key.removeprefix(begin): tensor for key, tensor in stored.items() if key.startswith(begin)}
    held = layer.state_dict()
    for key in held:
        if key.startswith("model.layers.0."):
            held[key] = value_of(own, key.removeprefix("model.layers.0."), held[key])
    held |= {"model.norm.weight": head_norm, "lm_head.weight": model.lm_head.weight.data}
    layer.load_state_dict(held)
    offset = 0.0 if name == "glm4moe" else 1.0

    def normed(rows: Tensor, weight: Tensor) -> Tensor:
        scale = (rows.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return rows * scale * (weight + offset)

    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[0]
        before = torch.cat([torch.zeros_like(hidden[:1]), hidden[:-1]])
        embedded = model.model.embed_tokens(ids)[0]
        rows = torch.cat([normed(embedded, enorm), normed(before, hnorm)], 1) @ projection.T
        logits: Tensor = layer(inputs_embeds=rows[None]).logits[0]
    return logits


def value_of(own: dict[str, Tensor], key: str, held: Tensor) -> Tensor:
    """Experts lie in a tensor each in folders, and in one here."""
    if key in own:
        return own[key]
    count, kind = len(held), key.rsplit(".", 1)[-1]
    assert kind in ("gate_up_proj", "down_proj"), key

    def expert(number: int, part: str) -> Tensor:
        return own[f"mlp.experts.{number}.{part}_proj.weight"]

    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    return torch.stack([torch.cat([expert(number, part) for part in parts]) for number in range(count)])


def logits_of(path: Path, backend: Backend[Any], exact: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [TOKENS, vocab] of the layer that drafts: of a prompt, and of the same token by token, in decode."""
    checkpoint = open_checkpoint(path)
    layer, blocks = DraftLayer(checkpoint), blocks_for(CONTEXT)
    cache = KVCache.allocate(checkpoint.config, CONTEXT, backend.device, keeps_hidden=True)
    own = KVCache.allocate(layer.config, CONTEXT, backend.device)
    if exact:
        cache, own = in_float64(cache), in_float64(own)
    decoder = Decoder(checkpoint.config, checkpoint.tensors, backend, CONTEXT, CONTEXT)
    decoder.kept = cache.hidden
    drafts = DraftDecoder(layer.config, layer.tensors, decoder, CONTEXT)
    ids, tables = token_ids(512).tolist(), list(cache.whole_tables)
    assert len(tables[0]) == blocks and drafts.bytes_per_token > 0
    for first, last in ((0, 24), (24, TOKENS)):  # over a chunk's border, too
        decoder.forward(prefill_batch([ids[first:last]], [first], [tables], backend.device), cache.layers)
    prompt = prefill_batch([ids], [0], [tables[:1]], backend.device, all_logits=True)
    whole = drafts.forward(prompt, own.layers).double()
    assert cache.hidden is not None
    kept, rows = cache.hidden.clone(), []
    for position, token in enumerate(ids):
        rows.append(
            drafts.forward(decode_batch([token], [position], [tables[:1]], backend.device), own.layers)
        )
        place = tables[0][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        assert not torch.equal(cache.hidden[place], kept[place]), "it writes its own row"
        cache.hidden.copy_(kept)
    return whole, torch.cat([row.double() for row in rows])


def in_float64(cache: KVCache) -> KVCache:
    """The same without rounding."""
    layers = [
        replace(layer, k=layer.k.double(), v=layer.v.double()) if hasattr(layer, "k") else layer
        for layer in cache.layers
    ]
    hidden = None if cache.hidden is None else cache.hidden.double()
    return replace(cache, layers=layers, hidden=hidden)


@pytest.mark.parametrize("kind", ["", ".gguf"], ids=["folder", "gguf"])
@pytest.mark.parametrize("name", MODELS)
def test_its_logits_are_those_of_transformers(root: Path, name: str, kind: str) -> None:
    exact = logits_of(root / f"{name}{kind}", ReferenceBackend(keep=True), exact=True)
    wanted = expected(root / name, name)
    for logits in exact:
        assert nmse(logits, wanted) < 1e-9
    for logits in logits_of(root / f"{name}{kind}", CpuBackend(1)):
        assert nmse(logits, wanted) < 1e-3
