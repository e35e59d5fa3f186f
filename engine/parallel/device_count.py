"""The default number of devices that share a model: the fewest of the first ones whose free memory holds it."""

from collections.abc import Callable, Mapping, Sequence

from quengine.errors import CannotRunError
from quengine.memory import gib


def fewest_devices(free: Sequence[int], needed: Callable[[int, bool], int | None]) -> int:
    """The smallest number of devices that hold a model, each its part. `free`: bytes free on each device.

    needed: bytes on each device, by the number of devices and whether the context is to be a usable one or the least;
    None: that number of devices cannot share the model.

    Raises:
        CannotRunError: all devices together do not hold it; the message has the figures.
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
    """The memory that each number of devices needs, for those numbers that can share the model."""
    return ", ".join(
        f"{gib(nbytes)} on one" if count == 1 else f"{gib(nbytes)} on each of {count}"
        for count, nbytes in ways.items()
        if nbytes is not None
    )
