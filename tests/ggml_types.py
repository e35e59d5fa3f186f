"""ggml's own dequantization of a tensor type, by the library inside xllamacpp."""

import ctypes

import numpy as np

from quengine.models.gguf.tensor_types import TYPE_BY_NAME
from tests.llama_cpp_vocab import library

_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class _TypeTraits(ctypes.Structure):
    """`ggml_type_traits` of ggml.h."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", _ToFloat),
        ("from_float_ref", ctypes.c_void_p),
    )


def _traits(name: str) -> _TypeTraits:
    lib = library()
    lib.ggml_get_type_traits.argtypes = [ctypes.c_int]
    lib.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    return lib.ggml_get_type_traits(TYPE_BY_NAME[name].number).contents


def ggml_sizes(name: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    traits = _traits(name)
    assert traits.type_name.decode().upper() == name
    return traits.blck_size, traits.type_size


def ggml_dequantize(name: str, data: np.ndarray) -> np.ndarray:
    """Rows of blocks, uint8 [R, row_bytes], as ggml's fp32."""
    block, nbytes = ggml_sizes(name)
    stored = np.ascontiguousarray(data)
    values = np.empty((len(stored), stored.shape[1] // nbytes * block), np.float32)
    _traits(name).to_float(stored.ctypes.data, values.ctypes.data, values.size)
    return values
