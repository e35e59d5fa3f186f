"""A vocabulary of bytes, and the compiler of constraints for it."""

import pytest

from quengine.models.tokenizer import Tokenizer
from quengine.structured.constraint import ConstraintCompiler
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bytes") / "vocab.gguf"
    return Tokenizer.from_gguf(
        GGUFBuilder().kvs({"general.architecture": "llama", **bpe_vocabulary()}).write(path)
    )


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer, tokenizer.vocab_size)
