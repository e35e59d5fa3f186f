"""The short convolution's kernel against the definition: results, and states behind them."""

from dataclasses import replace

import pytest
import torch

from quengine.kernels.backend import SlotLayer
from quengine.kernels.cuda.short_conv import short_conv
from quengine.kernels.forward_batch import ForwardBatch
from tests.kernels.short_conv_steps import STEPS, expected, rows_of, spec_of, states


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("channels", "taps"), [(300, 3), (24, 4), (64, 1)])
def test_steps_are_those_of_the_definition(step: str, channels: int, taps: int, device: torch.device) -> None:
    batch, spec, state = STEPS[step], spec_of(channels, taps), states(channels)
    bcx = rows_of(len(batch), channels, 3)
    wanted, after = expected(batch, bcx, spec, state)
    layer = SlotLayer((state.clone().to(device),))
    sequences = None
    if batch.phase == "prefill":
        lengths = torch.tensor(batch.query_lens)
        sequences = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths).to(device)
    given = replace(spec, weight=spec.weight.to(device))
    tables = batch.block_tables_of(1).to(device)
    positions = batch.positions.to(device)
    y = short_conv(bcx.to(device), given, layer, positions, tables, sequences, batch.shares_sequences)
    torch.testing.assert_close(y.cpu(), wanted, rtol=1e-6, atol=1e-6)
    # Of a chunk the newest rows are stored alone: older ones are never read.
    kept = layer.parts[0].cpu()
    for slot, end in ends(batch).items():
        places = [position % len(after[slot]) for position in range(max(0, end - taps + 1), end)]
        torch.testing.assert_close(kept[slot, places], after[slot, places], rtol=1e-6, atol=0)


def ends(batch: ForwardBatch) -> dict[int, int]:
    """Of each slot of a step the position behind its newest row."""
    found: dict[int, int] = {}
    slots = batch.slots_of(1).tolist()
    if batch.phase == "prefill":
        spans = zip(batch.starts, batch.query_lens, strict=True)
        return {slot: sum(span) for slot, span in zip(slots, spans, strict=True)}
    for slot, position in zip(slots, batch.positions.tolist(), strict=True):
        found[slot] = max(position + 1, found.get(slot, 0))
    return found
