"""Models whose states cannot go back: Qwen3.5, and an LFM2 whose definition counts what each state stands for."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

from quengine.kernels.backend import SlotLayer
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CONV_HISTORY
from quengine.kernels.reference import ReferenceBackend
from quengine.kernels.short_conv import ShortConvSpec
from quengine.models.blocks.block import SlotState
from quengine.models.blocks.short_conv import ShortConv
from quengine.models.synthetic.presets import synthetic_preset
from quengine.models.synthetic.synthetic import write_synthetic


def write_small(path: Path, preset: str) -> Path:
    """A file of one of them, "lfm2-tiny" or "qwen3.5-tiny", or of another preset, at that path."""
    found = synthetic_preset(preset)
    assert found is not None
    small = replace(found, embedding_length=256, feed_forward_length=256, vocab_size=512)
    if preset == "lfm2-tiny":  # of which tests run the definition, and mean the states
        small = replace(
            small,
            embedding_length=64,
            feed_forward_length=64,
            head_count=2,
            head_count_kv=1,
            head_dim=32,
            quant="Q8_0",
        )
    return write_synthetic(path, small)


def _state(self: ShortConv) -> SlotState:
    return SlotState(((CONV_HISTORY, self.channels), (1, self.channels)))


def _counted(batch: ForwardBatch, state: SlotLayer, group: int) -> None:
    """Each row is the one behind those that its state stands for; the first begins anew whatever the slot held."""
    counts = state.parts[1]
    for span, start, slot in batch.sequences(group, counts):
        rows = span.stop - span.start
        assert start == 0 or (counts[slot] == start).all(), (
            f"slot {slot}: {counts[slot, 0, 0]} tokens, {start} due"
        )
        counts[slot] = start + rows


@contextmanager
def states_that_count() -> Iterator[None]:
    """Inside, no state goes back, and the reference backend refuses a step that repeats a token, or leaves one out."""
    short_conv = ReferenceBackend.short_conv

    def counting(
        self: ReferenceBackend, batch: ForwardBatch, x: Tensor, spec: ShortConvSpec, state: SlotLayer
    ) -> Tensor:
        _counted(batch, state, spec.cache_group)
        return short_conv(self, batch, x, spec, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShortConv, "state", property(_state))
        patch.setattr(ReferenceBackend, "short_conv", counting)
        yield
