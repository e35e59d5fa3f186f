"""Text to token ids and back, from GGUF metadata or a Hugging Face checkpoint folder."""

from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.tokenizer import Tokenizer

__all__ = ["Tokenizer", "TokenizerError"]
