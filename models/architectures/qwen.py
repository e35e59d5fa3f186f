"""Qwen2 (biases of query, key and value) and Qwen3 (a norm of each query and key head instead; its rerankers too).

Qwen3-Reranker scores a pair of texts by the output matrix's rows for "yes" and "no" at the prompt's last position. GGUF
files (llama.cpp's converter) have these two rows as their head. Folders name no head, or are classifiers
(`Qwen3ForSequenceClassification`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from quengine.models.architectures.architecture import Architecture, Fields, Keys, ModelType
from quengine.models.architectures.bert import classes_of
from quengine.models.architectures.windows import from_max_window_layers
from quengine.models.blocks import AttentionForm, BlockForm
from quengine.models.config import ModelConfig, Ranker

if TYPE_CHECKING:
    from quengine.models.gguf import GGUFFile

_DEFAULTS = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_HEAD, _TEMPLATE = "cls.output.weight", "tokenizer.chat_template.rerank"
RANK_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: Given a web '
    "search query, retrieve relevant passages that answer the query\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt that Qwen3-Reranker was trained with (its model card)."""


def without_unused_window(keys: Keys) -> Keys:
    """config.json, whose `sliding_window` counts only with `use_sliding_window`."""
    return keys if keys.get("use_sliding_window") else {**keys, "sliding_window": None}


def _model_type(**defaults: int) -> ModelType:
    return ModelType(
        {**_DEFAULTS, **defaults},
        layer_kinds=from_max_window_layers,
        reads_layer_types=True,
        common_keys=without_unused_window,
    )


def _ranker_fields(keys: Keys, _config: ModelConfig) -> Fields:
    """The fields of a classifier: its head is a matrix of its own, and there is no output matrix."""
    if "Qwen3ForSequenceClassification" not in (keys.get("architectures") or ()):
        return {}
    return {"ranker": Ranker(classes_of(keys), False, RANK_TEMPLATE), "pooling": "rank", "tied_output": True}


def _gguf_fields(file: "GGUFFile", _config: ModelConfig) -> Fields:
    head = file.tensors.get(_HEAD)
    if head is None:
        return {}
    if head.shape[0] != 2:
        problem = f"{head.shape[0]} outputs are not implemented, only two are: yes and no"
        raise file.tensor_error(_HEAD, problem)
    ranker = Ranker(2, True, file.get_str(_TEMPLATE) or RANK_TEMPLATE)
    if ranker.missing:
        raise file.error(_TEMPLATE, f"has no {ranker.missing}: all pairs would have the same score")
    return {"ranker": ranker, "pooling": "rank"}


QWEN2 = Architecture(
    name="qwen2", block=BlockForm(AttentionForm(qkv_bias=True)), model_types={"qwen2": _model_type()}
)

QWEN3 = Architecture(
    name="qwen3",
    block=BlockForm(AttentionForm(qk_norm="head")),
    model_types={"qwen3": replace(_model_type(head_dim=128), fields=_ranker_fields)},
    gguf_fields=_gguf_fields,
)
