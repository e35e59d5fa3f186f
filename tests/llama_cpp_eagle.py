"""The logits that llama.cpp computes from an EAGLE-3 file, by functions of llama.h and llama-ext.h in xllamacpp."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_float, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from tests.llama_cpp_logits import _ContextParams
from tests.llama_cpp_vocab import library
from tests.transformers_models import TOKENS, token_ids

_ENCODE, _DECODE = 0, 1
"""`llama_process_type`."""


class _Embd(ctypes.Structure):
    """`llama_embd` of llama.h."""

    _fields_ = (("data", POINTER(c_float)), ("n_rows", c_size_t), ("n_embd", c_size_t))


def llama_cpp_eagle_logits(
    target: Path, draft: Path, layers: Sequence[int], width: int, vocab: int
) -> np.ndarray:
    """After each token but the first, [TOKENS - 1, vocab], -inf where none is drafted.

    The draft model's embedding must be its own, `width` that of both models.
    """
    lib, ids = _library(), token_ids(vocab).tolist()
    context = _context(lib, target)
    for layer in layers:
        lib._Z30llama_set_embeddings_layer_inpP13llama_contextjb(context, layer, True)
    batch = lib.llama_batch_ext_init(context)
    for position, token in enumerate(ids):
        _set(lib, batch, lib.llama_batch_ext_add_token(batch, 0, token), position, "logits")
    assert lib.llama_process(context, _DECODE, batch) == 0
    get_inputs = lib._Z30llama_get_embeddings_layer_inpP13llama_contextj
    inputs = [_rows(get_inputs(context, layer), TOKENS, width) for layer in layers]
    features = np.ascontiguousarray(np.concatenate(inputs, 1))
    context = _context(lib, draft)
    lib._Z26llama_set_embeddings_nextnP13llama_contextbb(context, True, True)
    batch = lib.llama_batch_ext_init(context)
    for position in range(TOKENS):
        row = lib.llama_batch_ext_add_embd(batch, 0, _embd(features[position]))
        _set(lib, batch, row, position, "embd")
    assert lib.llama_process(context, _ENCODE, batch) == 0
    fused = _rows(lib._Z26llama_get_embeddings_nextnP13llama_context(context), TOKENS, width)
    lib.llama_batch_ext_clear(batch)
    for position in range(TOKENS - 1):
        row = lib.llama_batch_ext_add_token(batch, 0, ids[position + 1])
        _set(lib, batch, row, position, "logits")
        assert lib.llama_batch_ext_set_embd_token(batch, row, _embd(fused[position]))
    assert lib.llama_process(context, _DECODE, batch) == 0
    return np.stack([_rows(lib.llama_get_logits_ith(context, row), 1, vocab)[0] for row in range(TOKENS - 1)])


def _context(lib: Any, path: Path) -> int:
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    context: int = model and lib.llama_init_from_model(model, lib.llama_context_default_params())
    assert context, f"llama.cpp does not load {path}"
    return context


def _set(lib: Any, batch: int, row: int, position: int, output: str) -> None:
    lib.llama_batch_ext_set_pos(batch, row, (c_int32 * 4)(position, position, position, 0))
    getattr(lib, f"llama_batch_ext_set_output_{output}")(batch, row, True)


def _embd(row: np.ndarray) -> _Embd:
    return _Embd(row.ctypes.data_as(POINTER(c_float)), 1, row.size)


def _rows(pointer: Any, rows: int, width: int) -> np.ndarray:
    return np.ctypeslib.as_array(pointer, (rows, width)).copy()


def _library() -> Any:
    lib: Any = library()
    floats = POINTER(c_float)
    for name, result, arguments in (
        ("llama_context_default_params", _ContextParams, ()),
        ("llama_init_from_model", c_void_p, (c_void_p, _ContextParams)),
        ("llama_get_logits_ith", floats, (c_void_p, c_int32)),
        ("llama_batch_ext_init", c_void_p, (c_void_p,)),
        ("llama_batch_ext_clear", None, (c_void_p,)),
        ("llama_batch_ext_add_token", c_int32, (c_void_p, c_int32, c_int32)),
        ("llama_batch_ext_add_embd", c_int32, (c_void_p, c_int32, _Embd)),
        ("llama_batch_ext_set_embd_token", c_bool, (c_void_p, c_int32, _Embd)),
        ("llama_batch_ext_set_pos", c_bool, (c_void_p, c_int32, POINTER(c_int32))),
        ("llama_batch_ext_set_output_logits", c_bool, (c_void_p, c_int32, c_bool)),
        ("llama_batch_ext_set_output_embd", c_bool, (c_void_p, c_int32, c_bool)),
        ("llama_process", c_int32, (c_void_p, c_int32, c_void_p)),
        ("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, (c_void_p, c_uint32, c_bool)),
        ("_Z30llama_get_embeddings_layer_inpP13llama_contextj", floats, (c_void_p, c_uint32)),
        ("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, (c_void_p, c_bool, c_bool)),
        ("_Z26llama_get_embeddings_nextnP13llama_context", floats, (c_void_p,)),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib
