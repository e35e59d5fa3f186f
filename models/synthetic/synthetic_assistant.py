"""The shape of an assistant that drafts for a Gemma 4, for benchmarks and tests."""

from quengine.models.config import LayerSizes, ModelConfig
from quengine.models.synthetic.presets import SyntheticModel

_WIDTH, _LENGTH, _LOCAL = 1024, 8192, 3
"""Width, feed-forward length and layers with a window: with the heads of Gemma 4 31B these are the 470 million weights
that its assistant is published with."""


def assistant_of(target: ModelConfig, width: int = _WIDTH, length: int = _LENGTH) -> SyntheticModel:
    """An assistant for a `gemma4` model of these sizes: three layers with a window and one without.

    width, length: of its hidden rows and its feed-forward.
    """
    windows = target.layer_windows
    last = {is_local: max(_own(target, is_local)) for is_local in (True, False)}
    kinds = (*(True,) * _LOCAL, False)
    assert windows[last[True]] is not None
    return SyntheticModel(
        "synthetic assistant",
        architecture="gemma4-assistant",
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        embedding_length=width,
        block_count=len(kinds),
        layer_sizes=tuple(
            LayerSizes(
                target.sizes(last[kind]).head_count,
                target.sizes(last[kind]).head_count_kv,
                length,
                target.head_size(last[kind]),
            )
            for kind in kinds
        ),
        rope_freq_base=target.rope_freq_base,
        rope_freq_factors=target.rope_scaling.freq_factors,
        sliding_window=target.sliding_window,
        tied_output=True,
        quant="Q4_0",
        target_width=target.embedding_length,
    )


def _own(target: ModelConfig, is_local: bool) -> list[int]:
    """The layers with keys and values of their own, those with a window or those without."""
    owners = target.block_count - target.shared_kv_layers
    return [i for i in range(owners) if (target.layer_windows[i] is not None) == is_local]
