"""Metadata keys of converted files of encoders, in parts as `keys` has them."""

from collections.abc import Mapping, Sequence

from quengine.models.config import PROJECTIONS
from quengine.models.convert.keys import (
    PARTS,
    Part,
    Source,
    given_head_size,
    head_size,
    layer_norm,
    no_rope_scaling,
    replace_key,
    vocab_size,
    window_base,
)

_UNNAMED = "LABEL_0"
"""The first label that `transformers` gives models of two, trained or not."""


def _both_sides(source: Source) -> None:
    """Non-causal attention, with as many key as query heads."""
    replace_key(source, "attention.head_count_kv", None)
    source.writer.add_causal_attention(False)


def _unrotated(source: Source) -> None:
    replace_key(source, "rope.freq_base", None)


def _roberta_context(source: Source) -> None:
    """The context is shorter by the rows up to the padding token's, even if a model has no table of positions."""
    replace_key(source, "context_length", None)
    padding = source.keys.get("pad_token_id")
    first = 0 if padding is None else padding + 1
    source.writer.add_context_length(source.config.context_length - first)


def _pooling(source: Source) -> None:
    import gguf

    kinds = {
        "mean": gguf.PoolingType.MEAN,
        "cls": gguf.PoolingType.CLS,
        "last": gguf.PoolingType.LAST,
    }
    if (kind := kinds.get(source.config.pooling or "")) is not None:
        source.writer.add_pooling_type(kind)


def _labels(source: Source) -> None:
    labels = source.keys.get("id2label") or {}
    names = [name for _, name in sorted(labels.items(), key=lambda item: int(item[0]))]
    if names and not (len(names) == 2 and names[0] == _UNNAMED):
        source.writer.add_classifier_output_labels(names)


def _modern(source: Source) -> None:
    import gguf

    kinds = {"cls": gguf.PoolingType.CLS, "mean": gguf.PoolingType.MEAN}
    kind = kinds[source.keys.get("classifier_pooling", "cls")]
    source.writer.add_uint32(f"{source.config.architecture}.classifier.pooling_type", kind)
    source.writer.add_sliding_window(source.keys["local_attention"])
    if (period := source.keys.get("global_attn_every_n_layers")) is not None:
        source.writer.add_sliding_window_pattern(period)
    if source.keys.get("layer_norm_eps") is not None:
        source.writer.add_layer_norm_eps(source.keys["layer_norm_eps"])
    if (activation := source.keys.get("hidden_activation")) is not None:
        source.writer.add_string(f"{source.config.architecture}.hidden_activation", activation)


def _gemma(source: Source) -> None:
    source.writer.add_sliding_window(source.keys["sliding_window"])
    assert source.config.encoder is not None
    for name, (columns, rows) in zip(PROJECTIONS, source.config.encoder.projections, strict=False):
        source.writer.add_dense_features_dims(name, columns, rows)


def _ranker(source: Source) -> None:
    """The keys of a causal model that ranks pairs by two rows of its output matrix (Qwen3-Reranker)."""
    import gguf

    if source.config.ranker is None:
        return
    source.writer.add_pooling_type(gguf.PoolingType.RANK)
    source.writer.add_classifier_output_labels(["yes", "no"])
    source.writer.add_chat_template([{"name": "rerank", "template": source.config.ranker.template}])


_BERT: Sequence[Part] = (_both_sides, layer_norm, _pooling, _labels)

ENCODER_PARTS: Mapping[str, Sequence[Part]] = {
    "bert": (*_BERT, _unrotated),
    "nomic-bert": (*_BERT, given_head_size),
    "jina-bert-v3": (*_BERT, _roberta_context),
    "modern-bert": (_both_sides, _pooling, _labels, _modern, vocab_size, window_base, no_rope_scaling),
    "gemma-embedding": (head_size, window_base, _gemma, _pooling),
    "qwen2": (*PARTS["qwen2"], _pooling),
    "qwen3": (*PARTS["qwen3"], _pooling, _ranker),
}
"""Architecture -> its parts, in place of those that `PARTS` has."""
