"""Every tensor type a GGUF file may name: its number in the file, its block size and its bytes.

It sizes tensors on disk. Which types run as stored, and what their bytes mean, `quengine.kernels` knows.
Numbers and sizes follow the ggml type list of the GGUF specification; numbers 4, 5, 31-33 and 36-38 were
withdrawn there and are unknown here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class TensorType:
    """One tensor type: `block` weights are stored in `nbytes` bytes."""

    number: int
    name: str
    block: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` weights; `columns` is a multiple of `block`."""
        return columns // self.block * self.nbytes


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        number: TensorType(number, name, block, nbytes)
        for number, name, block, nbytes in (
            (0, "F32", 1, 4),
            (1, "F16", 1, 2),
            (2, "Q4_0", 32, 18),
            (3, "Q4_1", 32, 20),
            (6, "Q5_0", 32, 22),
            (7, "Q5_1", 32, 24),
            (8, "Q8_0", 32, 34),
            (9, "Q8_1", 32, 40),
            (10, "Q2_K", 256, 84),
            (11, "Q3_K", 256, 110),
            (12, "Q4_K", 256, 144),
            (13, "Q5_K", 256, 176),
            (14, "Q6_K", 256, 210),
            (15, "Q8_K", 256, 292),
            (16, "IQ2_XXS", 256, 66),
            (17, "IQ2_XS", 256, 74),
            (18, "IQ3_XXS", 256, 98),
            (19, "IQ1_S", 256, 50),
            (20, "IQ4_NL", 32, 18),
            (21, "IQ3_S", 256, 110),
            (22, "IQ2_S", 256, 82),
            (23, "IQ4_XS", 256, 136),
            (24, "I8", 1, 1),
            (25, "I16", 1, 2),
            (26, "I32", 1, 4),
            (27, "I64", 1, 8),
            (28, "F64", 1, 8),
            (29, "IQ1_M", 256, 56),
            (30, "BF16", 1, 2),
            (34, "TQ1_0", 256, 54),
            (35, "TQ2_0", 256, 66),
            (39, "MXFP4", 32, 17),
            (40, "NVFP4", 64, 36),
            (41, "Q1_0", 128, 18),
            (42, "Q2_0", 64, 18),
        )
    }
)

TYPE_BY_NAME: Mapping[str, TensorType] = MappingProxyType({t.name: t for t in TENSOR_TYPES.values()})
