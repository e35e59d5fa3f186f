"""ggml's own quantizers, the peer of `kernels/quantize`, called through the library inside xllamacpp."""

import ctypes

import numpy as np
import numpy.typing as npt

from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from tests.llama_cpp_vocab import library

Floats = npt.NDArray[np.float32]


def ggml_quantize(name: str, rows: Floats, importance: Floats | None = None) -> npt.NDArray[np.uint8]:
    """`ggml_quantize_chunk`: fp32 [R, K] as blocks, uint8 [R, row_bytes]; `importance` fp32 [K] for every row."""
    kind, (count, columns) = TYPE_BY_NAME[name], rows.shape
    quantize = library().ggml_quantize_chunk
    quantize.restype = ctypes.c_size_t
    quantize.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p),
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p),
    ]
    rows = np.ascontiguousarray(rows, np.float32)
    blocks = np.zeros((count, kind.row_bytes(columns)), np.uint8)
    weights = None if importance is None else importance.ctypes.data
    written = quantize(kind.number, rows.ctypes.data, blocks.ctypes.data, 0, count, columns, weights)
    assert written == blocks.size
    return blocks
