"""Matrices cut from a pool of random rows: drawing each of a large model anew would take minutes."""

import numpy as np
from numpy.typing import NDArray

from quengine.kernels.block_formats import FORMATS
from quengine.models.blocks.block import Shape
from quengine.models.synthetic.random_blocks import random_rows

_POOL_BYTES = 1 << 25


class PooledRows:
    """Random rows of every type and width that a model's experts or layers have, each drawn once.

    A matrix begins at a row of its own of the pool, and goes on at the pool's beginning behind its end, so that no two
    experts of a tensor are equal. A tensor that is no larger than the pool is drawn whole.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[str, int], NDArray[np.uint8]] = {}
        self._whole = np.empty(0, np.uint8)

    def tensor(self, kind: str, shape: Shape, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Weights [E, rows, columns] or [rows, columns] of type `kind` and standard deviation columns^-0.5.

        Returns uint8 [E * rows, row bytes].

        Valid until the next call.
        """
        count, rows, cols = shape if len(shape) == 3 else (1, *shape)
        width = FORMATS[kind].row_bytes(cols)
        if count * rows * width <= _POOL_BYTES:
            return random_rows(kind, count * rows, cols, cols**-0.5, rng)
        pool = self._pool(kind, cols)
        if self._whole.size < count * rows * width:
            self._whole = np.empty(count * rows * width, np.uint8)
        whole = self._whole[: count * rows * width].reshape(count, rows, width)
        for matrix, first in zip(whole, rng.choice(len(pool), count, replace=False), strict=True):
            _fill(matrix, pool, int(first))
        return whole.reshape(-1, width)

    def _pool(self, kind: str, cols: int) -> NDArray[np.uint8]:
        if (kind, cols) not in self._pools:
            rng = np.random.default_rng([self._seed, cols, *kind.encode()])
            rows = _POOL_BYTES // FORMATS[kind].row_bytes(cols)
            self._pools[kind, cols] = random_rows(kind, rows, cols, cols**-0.5, rng)
        return self._pools[kind, cols]


def _fill(matrix: NDArray[np.uint8], pool: NDArray[np.uint8], first: int) -> None:
    """Rows of the pool from `first` on, round and round."""
    done = 0
    while done < len(matrix):
        part = pool[first : first + len(matrix) - done]
        matrix[done : done + len(part)] = part
        done, first = done + len(part), 0
