"""Tensors that a Hugging Face folder holds within others: a part of the rows, transposed, or packed as MXFP4.

A packed tensor is two there: `NAME_blocks`, uint8 [..., rows, columns / 32, 16], has the E2M1 codes of 32 weights in
order, the even ones in the low halves of bytes; `NAME_scales`, uint8 [..., rows, columns / 32], their E8M0 scales (OCP
Microscaling Formats specification 1.0). A block of GGUF is the same scale, then 16 bytes with the codes of weights 0 to
15 in the low halves and 16 to 31 in the high ones. Nothing is rounded.
"""

import torch
from torch import Tensor

from quengine.models.architectures.architecture import HFPart
from quengine.models.hf.hf_shards import HFShards, StoredTensor

_BLOCK = 32
_BLOCK_BYTES = 17


class StoredPart:
    """The tensor of `shape` that is the part `part` of one in `shards`, whose name begins with `layer`.

    bias: rows are its elements, the last dimension. `header` is that of the part itself; `names` are the stored tensors
    that it comes from.

    Raises:
        EngineError: a tensor is missing, of a wrong shape or of an unsupported type.
    """

    def __init__(
        self, shards: HFShards, layer: str, part: HFPart, shape: tuple[int, ...], bias: bool = False
    ) -> None:
        self._shards, self._part, self._bias = shards, part, bias
        *outer, rows, cols = (*shape, 1) if bias else shape
        self._rows = _slice(part, rows)
        every = rows if part.rows == "all" else 2 * rows
        name = layer + part.name
        packed = (f"{name}_blocks", f"{name}_scales")
        self._packed = not bias and packed[0] in shards.files
        self.names = packed if self._packed else (name,)
        if self._packed:
            if cols % _BLOCK:
                raise shards.error(f"tensor {packed[0]!r}: {cols} columns are not whole blocks of {_BLOCK}")
            groups = (*outer, every, cols // _BLOCK)
            shards.stored(packed[0], (*groups, _BLOCK // 2), ("U8",))
            shards.stored(packed[1], groups, ("U8",))
            self.header = StoredTensor(packed[0], "MXFP4", shape)
            return
        matrix = (cols, every) if part.transposed else (every, cols)
        whole = (*outer, every) if bias else (*outer, *matrix)
        self.header = StoredTensor(name, shards.stored(name, whole).dtype, shape)

    def data(self) -> Tensor:
        """Its rows as blocks of the header's format: uint8 [rows, row bytes], a copy."""
        if self._packed:
            blocks, scales = (self._shards.tensor(name) for name in self.names)
            return gguf_blocks(blocks[..., self._rows, :, :], scales[..., self._rows, :])
        tensor = self._shards.tensor(self.names[0])
        if self._part.transposed:
            tensor = tensor.transpose(-1, -2)
        tensor = tensor[..., self._rows] if self._bias else tensor[..., self._rows, :]
        return tensor.reshape(-1, self.header.shape[-1]).contiguous().view(torch.uint8)


def gguf_blocks(blocks: Tensor, scales: Tensor) -> Tensor:
    """MXFP4 blocks, uint8 [E, rows, groups, 16], and scales, uint8 [E, rows, groups], as GGUF has them.

    uint8 [E * rows, groups * 17].
    """
    out = torch.empty(*scales.shape, _BLOCK_BYTES, dtype=torch.uint8)
    out[..., 0] = scales
    for matrix, codes in zip(out, blocks, strict=True):  # one by one, as a layer's experts take gigabytes
        even, odd = codes & 0xF, codes >> 4
        # Bytes 0 to 7 have weights 0 to 15 in turns, 8 to 15 the others.
        matrix[..., 1::2] = even[..., :8] | even[..., 8:] << 4
        matrix[..., 2::2] = odd[..., :8] | odd[..., 8:] << 4
    return out.reshape(-1, scales.shape[-1] * _BLOCK_BYTES)


def _slice(part: HFPart, rows: int) -> slice:
    """Those of the stored rows which are the part's `rows`."""
    return {
        "all": slice(None),
        "first half": slice(rows),
        "second half": slice(rows, None),
        "even": slice(0, None, 2),
        "odd": slice(1, None, 2),
    }[part.rows]
