"""The definition of the short convolution against torch's."""

import torch

from quengine.kernels.short_conv import short_conv
from tests.kernels.short_conv_steps import prompt, rows_of, spec_of, states, tokens


def test_the_definition_is_a_convolution() -> None:
    """Over a whole text at once, in pieces of any length, and token by token."""
    channels, count = 8, 90
    spec, bcx = spec_of(channels, 3), rows_of(count, channels, 5).double()
    b, c, x = bcx.chunk(3, dim=1)
    u = torch.nn.functional.pad((b * x).T[None], (2, 0))
    whole = c * torch.nn.functional.conv1d(u, spec.weight.double().T[:, None], groups=channels)[0].T
    for pieces in ([count], [1, 2, 40, 47], [1] * count, [33, *[1] * 57]):
        state, start, found = states(channels), 0, []
        for length in pieces:
            batch = tokens([start], [2]) if length == 1 else prompt([length], [start], [2])
            found.append(short_conv(batch, bcx[start : start + length], spec, state))
            start += length
        assert torch.allclose(torch.cat(found), whole, atol=1e-6)
