"""llama.cpp's own tokenizer, the peer that ids are compared with, called through the library inside xllamacpp.

xllamacpp's Python interface has no tokenizing without a running server and full weights; the C functions of
llama.h that the library exports take a vocabulary-only file.
"""

import ctypes
from functools import cache
from pathlib import Path
from types import TracebackType


class _ModelParams(ctypes.Structure):
    """`llama_model_params` of llama.h. A changed layout shows as a file that does not load."""

    _fields_ = [
        ("devices", ctypes.c_void_p),
        ("tensor_buft_overrides", ctypes.c_void_p),
        ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int),
        ("load_mode", ctypes.c_int),
        ("lazy_mode", ctypes.c_int),
        ("main_gpu", ctypes.c_int32),
        ("tensor_split", ctypes.c_void_p),
        ("progress_callback", ctypes.c_void_p),
        ("progress_callback_user_data", ctypes.c_void_p),
        ("kv_overrides", ctypes.c_void_p),
        ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool),
        ("use_extra_bufts", ctypes.c_bool),
        ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool),
        ("load_mtp", ctypes.c_bool),
    ]


_LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ignore_log = _LogCallback(lambda _level, _text, _data: None)


@cache
def library() -> ctypes.CDLL:
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    library.llama_log_set.argtypes = [_LogCallback, ctypes.c_void_p]
    library.llama_model_default_params.restype = _ModelParams
    library.llama_model_load_from_file.argtypes = [ctypes.c_char_p, _ModelParams]
    library.llama_model_load_from_file.restype = ctypes.c_void_p
    library.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    library.llama_model_get_vocab.restype = ctypes.c_void_p
    library.llama_model_free.argtypes = [ctypes.c_void_p]
    library.llama_vocab_n_tokens.argtypes = [ctypes.c_void_p]
    library.llama_vocab_is_eog.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    library.llama_vocab_is_eog.restype = ctypes.c_bool
    library.llama_tokenize.argtypes = [
        *(ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32),
        *(ctypes.POINTER(ctypes.c_int32), ctypes.c_int32, ctypes.c_bool, ctypes.c_bool),
    ]
    library.llama_token_to_piece.argtypes = [
        *(ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_bool)
    ]
    library.llama_log_set(_ignore_log, None)
    library.llama_backend_init()
    return library


class LlamaCppVocab:
    """The vocabulary of one GGUF file in llama.cpp; a context manager."""

    def __init__(self, path: str | Path) -> None:
        self._library = library()
        params = self._library.llama_model_default_params()
        params.vocab_only = True
        self._model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load the vocabulary of {path}")
        self._vocab = self._library.llama_model_get_vocab(self._model)

    @property
    def pointer(self) -> ctypes.c_void_p:
        """`llama_vocab *`, valid while the file is open."""
        return ctypes.c_void_p(self._vocab)

    def __enter__(self) -> "LlamaCppVocab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._library.llama_model_free(self._model)

    def encode(self, text: str, bos: bool = False, special: bool = False) -> list[int]:
        raw = text.encode()
        room = len(raw) + 16
        ids = (ctypes.c_int32 * room)()
        count = self._library.llama_tokenize(self._vocab, raw, len(raw), ids, room, bos, special)
        if count < 0:
            raise RuntimeError(f"llama.cpp wants room for {-count} tokens of {len(raw)} bytes")
        return list(ids[:count])

    def piece(self, token_id: int) -> bytes:
        """The token's bytes, control tokens by name."""
        buffer = ctypes.create_string_buffer(1024)
        count = self._library.llama_token_to_piece(self._vocab, token_id, buffer, 1024, 0, True)
        return buffer.raw[:count]

    def end_of_generation(self) -> set[int]:
        count = self._library.llama_vocab_n_tokens(self._vocab)
        return {i for i in range(count) if self._library.llama_vocab_is_eog(self._vocab, i)}
