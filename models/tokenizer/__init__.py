"""Text to token ids and back, from GGUF metadata or a Hugging Face checkpoint folder."""

from quengine.models.tokenizer.tokenizer import Tokenizer
from quengine.models.tokenizer.vocabulary import TokenizerError

__all__ = ["Tokenizer", "TokenizerError"]
