"""The logits that llama.cpp computes from a GGUF file, by functions of llama.h in the package xllamacpp."""

import ctypes
from pathlib import Path

import numpy as np

from tests.llama_cpp_vocab import library
from tests.transformers_models import TOKENS, token_ids


class _ContextParams(ctypes.Structure):
    """`llama_context_params` of llama.h as bytes, more than it has: it is passed on as the library made it."""

    _fields_ = (("bytes", ctypes.c_byte * 1024),)


class _Batch(ctypes.Structure):
    """`llama_batch` of llama.h."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


def llama_cpp_logits(path: Path, vocab: int, width: int = 0) -> np.ndarray | None:
    """llama.cpp's logits of the tokens [TOKENS, vocab], or of an encoder of this `width` its rows [TOKENS, width]; None
    where it does not load the file, or makes none."""
    lib = library()
    lib.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_get_embeddings_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_embeddings_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_context_default_params.restype = _ContextParams
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _ContextParams]
    lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_batch_init.restype = _Batch
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    context = model and lib.llama_init_from_model(model, lib.llama_context_default_params())
    if not context:
        return None
    if width:
        lib.llama_set_embeddings(context, True)
    batch = lib.llama_batch_init(TOKENS, 0, 1)
    batch.n_tokens = TOKENS
    for i, token in enumerate(token_ids(vocab).tolist()):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    if lib.llama_decode(context, batch):
        return None
    rows = lib.llama_get_embeddings_ith if width else lib.llama_get_logits_ith
    found = [rows(context, i) for i in range(TOKENS)]
    if not all(found):
        return None
    return np.stack([np.ctypeslib.as_array(row, (width or vocab,)).copy() for row in found])
