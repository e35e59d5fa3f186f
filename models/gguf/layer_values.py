"""Metadata that some files give once for the model and some once a layer."""

from collections.abc import Sequence

import numpy as np

from quengine.models.gguf.file import GGUFFile


def uniform_int(
    file: GGUFFile, key: str, low: int, high: int, default: int | None = None, but_zeros: bool = False
) -> int:
    """The integer at `key`, or that of an array in which all layers agree; `default` where the key is absent.

    but_zeros: layers with 0 have none of what is counted, and need not agree.

    Raises:
        GGUFError: absent without a default, of another type, not in [low, high], or different between layers.
    """
    value = file.metadata.get(key)
    if isinstance(value, np.ndarray):
        values = file.get_ints(key)
        assert values is not None
        distinct = [value for value in np.unique(values).tolist() if value or not but_zeros]
        if not distinct and len(values):
            raise file.error(key, "is 0 in every layer, which the decoder does not implement")
        if len(distinct) != 1:
            shown = ", ".join(map(str, distinct[:4]))
            raise file.error(key, f"differs between layers ({shown}), which the decoder does not implement")
        number = int(distinct[0])
        if not low <= number <= high:
            raise file.error(key, f"{number} is not from {low} to {high}")
        return number
    if value is None and default is not None:
        return default
    return file.require_int(key, low, high)


def ints_of_layers(
    file: GGUFFile, key: str, low: int, high: int, layers: int, default: Sequence[int] = ()
) -> Sequence[int]:
    """The integers at `key`, one for each layer, or the same for all of them; `default` where the key is absent.

    Raises:
        GGUFError: absent without a default, of another type, not in [low, high], or not one for each layer.
    """
    value = file.metadata.get(key)
    if not isinstance(value, np.ndarray):
        return default if value is None and default else [file.require_int(key, low, high)] * layers
    values = file.get_ints(key)
    assert values is not None
    if len(values) != layers:
        raise file.error(key, f"has {len(values)} numbers for {layers} layers")
    for number in values.tolist():
        if not low <= number <= high:
            raise file.error(key, f"{number} is not from {low} to {high}")
    return [int(number) for number in values]
