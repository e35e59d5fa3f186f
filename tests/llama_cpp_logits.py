"""The logits that llama.cpp computes from a GGUF file, by functions of llama.h in the package xllamacpp."""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tests.llama_cpp_vocab import library
from tests.transformers_models import token_ids


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


def _library() -> ctypes.CDLL:
    lib = library()
    lib.llama_set_embeddings.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_get_embeddings_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_embeddings_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_context_default_params.restype = _ContextParams
    lib.llama_init_from_model.argtypes = [ctypes.c_void_p, _ContextParams]
    lib.llama_init_from_model.restype = ctypes.c_void_p
    lib.llama_free.argtypes = [ctypes.c_void_p]
    lib.llama_get_memory.argtypes = [ctypes.c_void_p]
    lib.llama_get_memory.restype = ctypes.c_void_p
    lib.llama_memory_clear.argtypes = [ctypes.c_void_p, ctypes.c_bool]
    lib.llama_batch_init.restype = _Batch
    lib.llama_batch_free.argtypes = [_Batch]
    lib.llama_decode.argtypes = [ctypes.c_void_p, _Batch]
    lib.llama_get_logits_ith.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    lib.llama_get_logits_ith.restype = ctypes.POINTER(ctypes.c_float)
    lib.llama_adapter_lora_init.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.llama_adapter_lora_init.restype = ctypes.c_void_p
    adapters, scales = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_float)
    lib.llama_set_adapters_lora.argtypes = [ctypes.c_void_p, adapters, ctypes.c_size_t, scales]
    return lib


class LlamaCpp:
    """A file in llama.cpp, with a context of its default 512 positions. Raises ValueError where it is not loaded.

    width: of the rows of an encoder; 0: it has logits. context: positions in place of the default's.
    """

    def __init__(self, path: Path, vocab: int, width: int = 0, context: int = 0) -> None:
        self._lib, self._columns, self._position = _library(), width or vocab, 0
        self._model = self._lib.llama_model_load_from_file(
            str(path).encode(), self._lib.llama_model_default_params()
        )
        defaults = self._lib.llama_context_default_params()
        if context:  # the first field
            ctypes.cast(ctypes.pointer(defaults), ctypes.POINTER(ctypes.c_uint32))[0] = context
        self._context = self._model and self._lib.llama_init_from_model(self._model, defaults)
        if not self._context:
            raise ValueError(f"llama.cpp does not load {path}")
        if width:
            self._lib.llama_set_embeddings(self._context, True)
        self._rows = self._lib.llama_get_embeddings_ith if width else self._lib.llama_get_logits_ith

    def __enter__(self) -> "LlamaCpp":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)

    def clear(self) -> None:
        """Begin another text."""
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        self._position = 0

    def adapt(self, adapters: Sequence[tuple[Path, float]]) -> None:
        """Apply these adapters with their scales. Raises ValueError where one is not loaded."""
        held = [self._lib.llama_adapter_lora_init(self._model, str(path).encode()) for path, _ in adapters]
        if not all(held):
            raise ValueError(f"llama.cpp does not load one of {adapters}")
        count = len(held)
        scales = (ctypes.c_float * count)(*(scale for _, scale in adapters))
        if self._lib.llama_set_adapters_lora(self._context, (ctypes.c_void_p * count)(*held), count, scales):
            raise ValueError("llama.cpp does not apply them")

    def step(self, ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """The logits [len(ids), vocab], or rows [len(ids), width], of these tokens, the next ones of the text, computed
        in one batch."""
        batch = self._lib.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i] = token, self._position + i
            batch.n_seq_id[i], batch.logits[i], batch.seq_id[i][0] = 1, 1, 0
        failed = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if failed:
            raise ValueError(f"llama_decode: {failed}")
        self._position += len(ids)
        rows = [self._rows(self._context, i) for i in range(len(ids))]
        if not all(rows):
            raise ValueError("llama.cpp makes no rows")
        return np.stack([np.ctypeslib.as_array(row, (self._columns,)).copy() for row in rows])


def llama_cpp_logits(path: Path, vocab: int, width: int = 0) -> np.ndarray | None:
    """llama.cpp's logits of the tokens [TOKENS, vocab], or of an encoder of this `width` its rows [TOKENS, width]; None
    where it does not load the file, or makes none."""
    try:
        with LlamaCpp(path, vocab, width) as model:
            return model.step(token_ids(vocab).tolist())
    except ValueError:
        return None
