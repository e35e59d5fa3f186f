"""The error of tokenizers that are well-formed but cannot be used: an unknown kind, contradictory tokens."""

from quengine.errors import EngineError


class TokenizerError(EngineError):
    """The model's tokenizer is of a kind that is not supported, or contradicts itself."""
