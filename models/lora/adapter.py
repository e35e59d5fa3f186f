"""A LoRA adapter as a record: for each changed matrix of a model two of low rank, whose scaled product is added.

Source: Hu et al. 2021, "LoRA": W + alpha / r * B A.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quengine.kernels.lora.change import LowRank

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
