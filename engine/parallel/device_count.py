"""How many devices share a model where nobody says: the fewest of the first ones whose free memory holds it."""

from collections.abc import Callable, Mapping, Sequence

from quengine.errors import CannotRunError
from quengine.memory import gib

USABLE_CONTEXT = 8192
"""Tokens of a context that is worth another device, of a model that was made for as many."""


def fewest_devices(free: Sequence[int], needed: Callable[[int, bool], int | None]) -> int:
    """How many of the devices with so many bytes free hold a model, each its part: one, where one does.

    needed: of a number of devices, the bytes on each of them, with a usable context or with the least; None: so many
    cannot share the model.

    Raises:
        CannotRunError: all of them together do not hold it; with the numbers.
    """
    for usable in (True, False):
        for count in range(1, len(free) + 1):
            nbytes = needed(count, usable)
            if nbytes is not None and nbytes <= min(free[:count]):
                return count
    ways = {count: needed(count, False) for count in range(1, len(free) + 1)}
    raise CannotRunError(
        f"not enough memory on {len(free)} CUDA devices: the model needs {_each(ways)}; free are "
        f"{', '.join(map(gib, free))}; use a smaller model or a smaller quantization"
    )


def _each(ways: Mapping[int, int | None]) -> str:
    """What it takes by number of devices, without those that cannot share it."""
    return ", ".join(
        f"{gib(nbytes)} on one" if count == 1 else f"{gib(nbytes)} on each of {count}"
        for count, nbytes in ways.items()
        if nbytes is not None
    )
