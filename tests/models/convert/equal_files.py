"""Two GGUF files compared: the same tensors bit for bit, the same metadata key by key."""

from pathlib import Path
from typing import Any

import numpy as np

from quengine.models.gguf import StringArray, open_gguf


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return [value.raw(i) for i in range(len(value))]
    return value.tolist() if isinstance(value, np.ndarray) else value


def contents(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and tensors, with their types."""
    with open_gguf(path) as file:
        metadata = {key: (entry.type_name, plain(entry.value)) for key, entry in file.entries.items()}
        tensors = {name: (t.type_name, t.shape, t.data.tobytes()) for name, t in file.tensors.items()}
    return metadata, tensors


def check_equal(ours: Path, theirs: Path, splits: bool = True, more: tuple[str, ...] = ()) -> None:
    """The same tensors and keys; but for the name of the pre-tokenizer, where not `splits`, and for `more`, tensors and
    keys that ours may have beside."""
    (metadata, tensors), (expected, expected_tensors) = contents(ours), contents(theirs)
    for name in more:
        for mine, other in ((metadata, expected), (tensors, expected_tensors)):
            if name not in other:
                mine.pop(name, None)
    for each in () if splits else (metadata, expected):
        each.pop("tokenizer.ggml.pre")
    assert metadata == expected
    assert tensors.keys() == expected_tensors.keys()
    for name, tensor in tensors.items():
        assert tensor == expected_tensors[name], name
