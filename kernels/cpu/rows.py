"""Rows of a prompt that are read, replaced or added to, by their numbers.

NumPy copies them in the calling thread. Torch wakes its own threads for more than 32,768 values, which then spin beside
the team of the CPU kernels: 8 to 28 ms a prompt on 16 cores.
"""

import torch
from torch import Tensor

from quengine.kernels.embedded_rows import EmbeddedRows


def taken_rows(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of fp32 [T, K]."""
    return torch.from_numpy(x.numpy().take(rows.numpy(), 0))


def add_to_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Adds values [n, K] to the rows `rows`, each at most once, of fp32 [T, K]."""
    x.numpy()[rows.numpy()] += values.numpy()


def place_rows(x: Tensor, given: EmbeddedRows | None) -> Tensor:
    """As `kernels.embedded_rows.place_embeddings`."""
    if given is not None:
        known = given.rows.numpy() >= 0
        x.numpy()[given.rows.numpy()[known]] = given.values.numpy()[known]
    return x
