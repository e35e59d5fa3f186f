"""llama.cpp's own samplers, the peer of `engine/sampling_chain`, called through the library inside xllamacpp."""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tests.llama_cpp_vocab import LlamaCppVocab, library


class _TokenData(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int32), ("logit", ctypes.c_float), ("p", ctypes.c_float)]


class _TokenDataArray(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.POINTER(_TokenData)),
        ("size", ctypes.c_size_t),
        ("selected", ctypes.c_int64),
        ("sorted", ctypes.c_bool),
    ]


_FLOAT, _INT, _SIZE = ctypes.c_float, ctypes.c_int32, ctypes.c_size_t
_ARGUMENTS = {
    "top_k": (_INT,),
    "top_p": (_FLOAT, _SIZE),
    "min_p": (_FLOAT, _SIZE),
    "typical": (_FLOAT, _SIZE),
    "temp": (_FLOAT,),
    "temp_ext": (_FLOAT, _FLOAT, _FLOAT),
    "top_n_sigma": (_FLOAT,),
    "xtc": (_FLOAT, _FLOAT, _SIZE, ctypes.c_uint32),
    "mirostat": (_INT, ctypes.c_uint32, _FLOAT, _FLOAT, _INT),
    "mirostat_v2": (ctypes.c_uint32, _FLOAT, _FLOAT),
    "penalties": (_INT, _INT, _FLOAT, _FLOAT, _FLOAT),
    "dist": (ctypes.c_uint32,),
    "infill": (ctypes.c_void_p,),
    "dry": (ctypes.c_void_p, _FLOAT, _FLOAT, _INT, _INT, ctypes.POINTER(ctypes.c_char_p), _SIZE),
}
"""Of llama_sampler_init_NAME."""


class LlamaCppSampler:
    """One sampler, made by `llama_sampler_init_NAME`."""

    def __init__(self, name: str, *arguments: object) -> None:
        self._library = library()
        make = getattr(self._library, f"llama_sampler_init_{name}")
        make.argtypes, make.restype = _ARGUMENTS[name], ctypes.c_void_p
        self._sampler = ctypes.c_void_p(make(*arguments))

    @classmethod
    def dry(
        cls,
        vocab: LlamaCppVocab,
        breakers: Sequence[str],
        multiplier: float,
        base: float,
        least: int,
        last_n: int,
    ) -> "LlamaCppSampler":
        texts = (ctypes.c_char_p * len(breakers))(*(text.encode() for text in breakers))
        return cls("dry", vocab.pointer, multiplier, base, least, last_n, texts, len(breakers))

    def reset(self) -> "LlamaCppSampler":
        self._library.llama_sampler_reset(self._sampler)
        return self

    def accept(self, tokens: Sequence[int]) -> "LlamaCppSampler":
        for token in tokens:
            self._library.llama_sampler_accept(self._sampler, ctypes.c_int32(token))
        return self

    def apply(self, array: _TokenDataArray) -> None:
        self._library.llama_sampler_apply(self._sampler, ctypes.byref(array))

    def __del__(self) -> None:
        self._library.llama_sampler_free(self._sampler)


class LlamaCppTokens:
    """The tokens of one position's logits [C], to which samplers are applied one after the other; `ids` [C]: of which
    tokens, where not of all."""

    def __init__(self, logits: npt.NDArray[np.float32], ids: Sequence[int] | None = None) -> None:
        self._data = (_TokenData * len(logits))()
        for place, (token, logit) in enumerate(zip(ids or range(len(logits)), logits.tolist(), strict=True)):
            self._data[place] = _TokenData(token, logit, 0.0)
        self._array = _TokenDataArray(self._data, len(logits), -1, False)

    def apply(self, *samplers: LlamaCppSampler) -> "LlamaCppTokens":
        for sampler in samplers:
            sampler.apply(self._array)
        return self

    @property
    def size(self) -> int:
        return int(self._array.size)

    @property
    def chosen(self) -> tuple[int, float]:
        """The token that a last sampler chose, and its probability."""
        data = self._array.data[self._array.selected]
        return int(data.id), float(data.p)

    def logits(self) -> dict[int, float]:
        """Token id -> logit of what is left."""
        return {each.id: each.logit for each in (self._array.data[i] for i in range(self.size))}

    def probabilities(self) -> dict[int, float]:
        """Token id -> probability, of the softmax over the logits; those of 0 are left out."""
        left = self.logits()
        logits = np.array(list(left.values()), dtype=np.float64)
        p = np.exp(logits - logits.max())
        p /= p.sum()
        return {token: value for token, value in zip(left, p.tolist(), strict=True) if value > 0}
