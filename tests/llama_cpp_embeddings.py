"""The pooled embedding that llama.cpp makes of a text, by functions of llama.h in the package xllamacpp."""

import ctypes
from pathlib import Path

import numpy as np

from tests.llama_cpp_logits import _Batch, _ContextParams
from tests.llama_cpp_vocab import library


def llama_cpp_embedding(path: Path, ids: list[int], width: int, adapter: Path | None = None) -> np.ndarray:
    """llama.cpp's vector [width] of a text's ids, pooled as the file says, not of unit length. adapter: a file.

    Raises:
        AssertionError: it does not load the file, or computes nothing.
    """
    lib = library()
    lib.llama_context_default_params.restype = _ContextParams
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _ContextParams]
    lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_batch_init.restype = _Batch
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    lib.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_get_embeddings_seq.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_embeddings_seq.restype = ctypes.POINTER(ctypes.c_float)
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    context = model and lib.llama_init_from_model(model, lib.llama_context_default_params())
    assert context, f"llama.cpp does not load {path}"
    if adapter is not None:
        lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
        lib.llama_adapter_lora_init.restype = ctypes.c_void_p
        held = lib.llama_adapter_lora_init(model, str(adapter).encode())
        assert held, f"llama.cpp does not load {adapter}"
        lib.llama_set_adapters_lora.argtypes = [
            *(
                ctypes.c_void_p,
                ctypes.POINTER(ctypes.c_void_p),
                ctypes.c_size_t,
                ctypes.POINTER(ctypes.c_float),
            )
        ]
        given = (ctypes.c_void_p * 1)(held), 1, (ctypes.c_float * 1)(1.0)
        assert not lib.llama_set_adapters_lora(context, *given)
    lib.llama_set_embeddings(context, True)
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert not lib.llama_decode(context, batch), "llama.cpp computes nothing"
    return np.ctypeslib.as_array(lib.llama_get_embeddings_seq(context, 0), (width,)).copy()
