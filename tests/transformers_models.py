"""Tiny models made, saved and run by `transformers`: what a checkpoint folder means is what they compute.

`transformers` takes a second to import, so this module does it in the functions that need it.
"""

import json
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quengine.kernels.backend import KVLayer, LayerState, SlotLayer
from quengine.kernels.forward_batch import prefill_batch
from quengine.kernels.reference import ReferenceBackend
from quengine.models.architectures import layers_of
from quengine.models.blocks.block import SlotState
from quengine.models.checkpoint import Checkpoint
from quengine.models.config import ModelConfig
from quengine.models.decoder import Decoder
from quengine.models.encoder import Encoder
from tests.forward import forward

VOCAB, CONTEXT = 64, 128
TOKENS = 40
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    # Attention that is not flat, and softmaxes that do not amplify the rounding of keys and products.
    "initializer_range": 0.12,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_OF_QWEN3 = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": SIZES["hidden_size"],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
QWEN_VISION = {
    "qwen2_vl_text": {"embed_dim": 32, "hidden_size": SIZES["hidden_size"], "mlp_ratio": 2},
    "qwen2_5_vl_text": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": SIZES["hidden_size"],
        "fullatt_block_indexes": [0],
    },
    "qwen3_vl_text": _OF_QWEN3,
    "qwen3_vl_moe_text": _OF_QWEN3,
}
"""Text model of a model with vision -> the vision part beside it."""

ENCODERS = ("bert", "xlm-roberta", "nomic_bert", "modernbert", "jina_embeddings_v3")
"""Model types whose positions all see each other, which Gemma 3's do where its configuration says so."""

DROP = object()
"""A value that takes the key out, for `edit`."""


def write_model(
    folder: Path,
    model_type: str,
    vision: bool = False,
    vocab: int = VOCAB,
    change: Callable[[Any], None] | None = None,
    fused: bool = False,
    **config: Any,
) -> Path:
    """`save_pretrained` of a model with random weights; `vision` puts it into its family's model with vision.

    change: alters the weights before they are saved. fused: a layer's experts are in one tensor, not one by one.
    `tie_word_embeddings` of a vision model goes to the outer configuration, where `transformers` reads it.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    outer = {"tie_word_embeddings": config.pop("tie_word_embeddings", True)} if vision else {}
    without = (
        "qwen2",
        "olmo2",
        "phi3",
        "smollm3",
        "cohere2",
        "lfm2",
        "lfm2_moe",
        "exaone4",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe_lite",
        "mistral4",
        *ENCODERS,
    )  # these have no such key
    head_dim = {} if model_type in without else {"head_dim": 16}
    text = transformers.AutoConfig.for_model(
        model_type, **{**SIZES, "vocab_size": vocab, "pad_token_id": 0, **head_dim, **config}
    )
    if vision and model_type in QWEN_VISION:
        whole = transformers.AutoConfig.for_model(
            model_type.removesuffix("_text"),
            text_config=text.to_dict(),
            vision_config={**QWEN_VISION[model_type], "depth": 1, "num_heads": 2, "patch_size": 4},
            **outer,
        )
        model = transformers.AutoModelForImageTextToText.from_config(whole)
    elif vision and model_type == "gemma3_text":
        tower = transformers.SiglipVisionConfig(**VISION)
        both = transformers.Gemma3Config(
            text_config=text.to_dict(), vision_config=tower.to_dict(), mm_tokens_per_image=4, **outer
        )
        model = transformers.Gemma3ForConditionalGeneration(both)
    elif vision and model_type.startswith("qwen3_5"):
        family = "Qwen3_5Moe" if "moe" in model_type else "Qwen3_5"
        sizes = {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        both = getattr(transformers, f"{family}Config")(
            text_config=text.to_dict(), vision_config=sizes, **outer
        )
        model = getattr(transformers, f"{family}ForConditionalGeneration")(both)
    elif vision:
        tower = transformers.PixtralVisionConfig(**VISION)
        both = transformers.Mistral3Config(text_config=text.to_dict(), vision_config=tower.to_dict(), **outer)
        model = transformers.Mistral3ForConditionalGeneration(both)
    elif "num_labels" in config:
        model = transformers.AutoModelForSequenceClassification.from_config(text)
    elif is_encoder(text.to_dict()):
        model = transformers.AutoModel.from_config(text)
    else:
        model = transformers.AutoModelForCausalLM.from_config(text)
    with torch.no_grad():
        for name, weight in chain(model.named_parameters(), model.named_buffers()):
            if name.endswith("bias") or "norm" in name:  # made as zeros and ones, which would hide them
                weight.add_(torch.randn_like(weight) * 0.2)
        if change is not None:
            change(model)
    model.save_pretrained(folder, save_original_format=not fused)
    return folder


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a model that makes embeddings or scores."""
    return config.get("model_type") in ENCODERS or bool(config.get("use_bidirectional_attention"))


def edit(folder: Path, text: dict[str, Any] | None = None, **changes: Any) -> None:
    """Changes keys of config.json, and those of its `text_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for part, values in ((config, changes), (config.get("text_config"), text or {})):
        for key, value in values.items():
            part[key] = value
            if value is DROP:
                del part[key]
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Any) -> None:
    """Lets `change` alter the dictionary of tensors of a folder with one safetensors file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def token_ids(vocab: int = VOCAB) -> Tensor:
    """[TOKENS] int64."""
    return torch.randint(0, vocab, (TOKENS,), generator=torch.Generator().manual_seed(3))


def transformers_model(folder: Path) -> tuple[Any, set[str]]:
    """What `from_pretrained` makes of the folder, in float64, and the weights that it made up, which are not there."""
    import transformers

    makers = {
        "mistral3": transformers.Mistral3ForConditionalGeneration,
        "gemma3": transformers.Gemma3ForConditionalGeneration,
        **{name.removesuffix("_text"): transformers.AutoModelForImageTextToText for name in QWEN_VISION},
        "qwen3_5": transformers.Qwen3_5ForConditionalGeneration,
        "qwen3_5_moe": transformers.Qwen3_5MoeForConditionalGeneration,
    }
    config = json.loads((folder / "config.json").read_text())
    maker = makers.get(config["model_type"], transformers.AutoModelForCausalLM)
    if is_encoder(config):
        headed = any("Classification" in name for name in config.get("architectures") or ())
        maker = transformers.AutoModelForSequenceClassification if headed else transformers.AutoModel
    model, info = maker.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager", output_loading_info=True
    )
    # transformers 5.17 unpacks packed experts to bfloat16, whatever is asked for.
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model.eval(), set(info["missing_keys"])


def transformers_logits(folder: Path, vocab: int = VOCAB) -> Tensor:
    """What `from_pretrained` makes of the folder, in float64: [TOKENS, vocab]."""
    model, _ = transformers_model(folder)
    with torch.no_grad():
        logits: Tensor = model(token_ids(vocab)[None]).logits[0]
    return logits


def our_logits(
    checkpoint: Checkpoint,
    vocab: int = VOCAB,
    backend: ReferenceBackend | None = None,
    context: int = CONTEXT,
) -> Tensor:
    """The reference backend's logits, float64 [TOKENS, vocab], over a cache that keeps fp32, in a run of `context`; of
    an encoder its rows [TOKENS, width], or its head's outputs [1, classes]."""
    config = checkpoint.config
    if config.encoder is not None:
        return _encoded(checkpoint, vocab, backend or ReferenceBackend(keep=True), context)
    decoder = Decoder(config, checkpoint.tensors, backend or ReferenceBackend(keep=True), context, CONTEXT)
    cache = unrounded_cache(config)
    return forward(decoder, token_ids(vocab), cache, all_logits=True)


def _encoded(checkpoint: Checkpoint, vocab: int, backend: ReferenceBackend, context: int) -> Tensor:
    encoder = Encoder(checkpoint.config, checkpoint.tensors, backend, context)
    batch = prefill_batch([token_ids(vocab).tolist()], [0], [[[0]]], backend.device)
    with torch.no_grad():
        rows = encoder.hidden(batch)
        headed = checkpoint.config.encoder is not None and checkpoint.config.encoder.classes
        return encoder.scores(rows)[None] if headed else rows


def unrounded_cache(config: ModelConfig) -> list[LayerState]:
    """A cache for one sequence that keeps keys and values in fp32."""
    cache: list[LayerState] = []
    for block in layers_of(config):
        state = block.state
        if isinstance(state, SlotState):
            cache.append(SlotLayer(tuple(torch.zeros(2, *shape) for shape in state.shapes)))
        else:
            cache.append(KVLayer(*torch.zeros(2, CONTEXT, state.kv_heads, state.head_dim)))
    return cache


def nmse(ours: Tensor, theirs: Tensor) -> float:
    """Squared error over squared signal, of the position that is worst."""
    return float((((ours - theirs) ** 2).sum(-1) / (theirs**2).sum(-1)).max())


def difference(checkpoint: Checkpoint, folder: Path, vocab: int = VOCAB) -> float:
    """`nmse` of a checkpoint's logits, to those that `transformers` gets from the folder."""
    return nmse(our_logits(checkpoint, vocab), transformers_logits(folder, vocab))
