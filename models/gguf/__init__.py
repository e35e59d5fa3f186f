"""GGUF files: a bounded, memory-mapping reader that trusts nothing it reads."""

from quengine.models.gguf.cursor import StringArray
from quengine.models.gguf.errors import GGUFError
from quengine.models.gguf.file import GGUFFile, open_gguf
from quengine.models.gguf.header import GGUFTensor

__all__ = ["GGUFError", "GGUFFile", "GGUFTensor", "StringArray", "open_gguf"]
