"""Tensors that a Hugging Face folder holds within others: a part of the rows, transposed, or packed as MXFP4.

A packed tensor is two there: `NAME_blocks`, uint8 [..., rows, columns / 32, 16], has the E2M1 codes of 32 weights in
order, the even ones in the low halves of bytes; `NAME_scales`, uint8 [..., rows, columns / 32], their E8M0 scales (OCP
Microscaling Formats specification 1.0). A block of GGUF is the same scale, then 16 bytes with the codes of weights 0 to
15 in the low halves and 16 to 31 in the high ones. Nothing is rounded.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quengine.models.architectures.architecture import HFPart
from quengine.models.hf.hf_shards import HFShards, StoredTensor

_BLOCK = 32
_GGUF_BLOCK = np.dtype([("scale", "u1"), ("codes", "V16")])
_LOW_HALVES, _FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)


class StoredPart:
    """The tensor of `shape` that is the part `part` of a tensor in `shards`, whose name begins with `layer`.

    bias: rows are its elements, the last dimension. picks: the result of `part.picks`. `header` is the part's own
    header. `names`: the stored tensors that it comes from. `copied`: its bytes are not stored in the wanted form, so
    that the part is a copy.

    Raises:
        EngineError: a tensor is missing, of a wrong shape or of an unsupported type.
    """

    def __init__(
        self,
        shards: HFShards,
        layer: str,
        part: HFPart,
        shape: tuple[int, ...],
        bias: bool = False,
        picks: tuple[int, Sequence[int]] | None = None,
    ) -> None:
        self._shards, self._part, self._bias = shards, part, bias
        *outer, rows, cols = (*shape, 1) if bias else shape
        self._rows: slice | list[int] = _slice(part, rows) if picks is None else list(picks[1])
        every = (rows if part.rows == "all" else 2 * rows) if picks is None else picks[0]
        name = layer + part.name
        packed = (f"{name}_blocks", f"{name}_scales")
        self._packed = not bias and packed[0] in shards.files
        self.names = packed if self._packed else (name,)
        together = len(shape) == 2 and part.rows in ("first half", "second half") and not part.transposed
        self.copied = self._packed or bias or not together
        if self._packed:
            if cols % _BLOCK:
                raise shards.error(f"tensor {packed[0]!r}: {cols} columns are not whole blocks of {_BLOCK}")
            groups = (*outer, every, cols // _BLOCK)
            shards.stored(packed[0], (*groups, _BLOCK // 2), ("U8",))
            shards.stored(packed[1], groups, ("U8",))
            self.header = StoredTensor(packed[0], "MXFP4", shape)
            return
        self._transposed = part.transposed is True or (
            part.transposed == "by shape" and shards.shape(name) != (*outer, every, cols)
        )
        matrix = (cols, every) if self._transposed else (every, cols)
        whole = (*outer, every) if bias else (*outer, *matrix)
        self.header = StoredTensor(name, shards.stored(name, whole).dtype, shape)

    def data(self) -> Tensor:
        """The part's rows as blocks of the header's format: uint8 [rows, row bytes], a view on the file or a copy."""
        if self._packed:
            blocks, scales = (self._shards.tensor(name) for name in self.names)
            return gguf_blocks(blocks[..., self._rows, :, :], scales[..., self._rows, :])
        tensor = self._shards.tensor(self.names[0])
        if self._transposed:
            tensor = tensor.transpose(-1, -2)
        tensor = tensor[..., self._rows] if self._bias else tensor[..., self._rows, :]
        return tensor.reshape(-1, self.header.shape[-1]).contiguous().view(torch.uint8)


def gguf_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """GGUF's MXFP4 blocks, uint8 [E * rows, groups * 17], of a folder's blocks, uint8 [E, rows, groups, 16], and
    scales, uint8 [E, rows, groups]."""
    out = np.empty(scales.shape, _GGUF_BLOCK)
    out["scale"] = scales.numpy()
    for matrix, codes in zip(out, blocks.numpy(), strict=True):  # one by one, as a layer's take gigabytes
        halves = np.ascontiguousarray(codes).view("<u8")  # weights 0 to 15 and 16 to 31
        low, high = halves[..., 0], halves[..., 1]
        even = low & _LOW_HALVES | (high & _LOW_HALVES) << _FOUR
        odd = low >> _FOUR & _LOW_HALVES | high & ~_LOW_HALVES
        in_turns = np.stack([even.view(np.uint8), odd.view(np.uint8)], axis=-1)
        matrix["codes"] = in_turns.reshape(codes.shape).view("V16")[..., 0]
    return torch.from_numpy(out.view(np.uint8).reshape(-1, scales.shape[-1] * _GGUF_BLOCK.itemsize))


def _slice(part: HFPart, rows: int) -> slice:
    """The stored rows that `part.rows` means, as a slice."""
    return {
        "all": slice(None),
        "first half": slice(rows),
        "second half": slice(rows, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }[part.rows]
