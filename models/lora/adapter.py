"""A LoRA adapter as a record: for each changed matrix, two matrices of low rank, whose scaled product is added to it.

Source: Hu et al. 2021, "LoRA": W + alpha / r * B A.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quengine.errors import EngineError
from quengine.kernels.lora.change import MOST_SCALE, LowRank

MOST_RANK = 1 << 13


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model.

    name: the file's `general.name`, or that of the file or folder. path: where it was read. changes: by the GGUF name
    of a tensor that the model's layers declare (`tensor_table.tensor_specs`), so never of one that holds several
    (attn_qkv beside attn_q).
    """

    name: str
    path: Path
    changes: Mapping[str, LowRank]


def parse_lora(text: str) -> tuple[Path, float]:
    """Splits "FILE" or "FILE:SCALE" into path and scale, 1 by default. Raises EngineError.

    If a file has the whole text as its name, there is no scale.
    """
    path, colon, scale = text.rpartition(":")
    if text and (not colon or Path(text).exists()):
        return Path(text), 1.0
    with suppress(ValueError):
        if path and abs(factor := float(scale)) <= MOST_SCALE:
            return Path(path), factor
    raise EngineError(
        f"--lora {text!r}: must be FILE or FILE:SCALE, as adapter.gguf:0.5, a scale from -1e9 to 1e9"
    )


def near(text: str, folder: Path) -> str:
    """ "FILE" or "FILE:SCALE" with a relative path from `folder` on, and its normal form. Raises EngineError."""
    if not text:
        raise EngineError("lora '': must be FILE or FILE:SCALE, as adapter.gguf:0.5")
    path, scale = parse_lora(str(folder / os.path.expanduser(text)))  # noqa: PTH111 (raises nothing)
    return os.path.normpath(path) + ("" if scale == 1.0 else f":{scale!r}")
