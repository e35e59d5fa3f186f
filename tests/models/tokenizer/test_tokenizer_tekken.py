"""Tekken, from Mistral's real file, against mistral-common; and where llama.cpp's approximation differs."""

from pathlib import Path

import pytest

from quengine.models.tokenizer import Tokenizer
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.mistral_vocab_files import data_file, write_vocabulary
from tests.text_samples import HAND_PICKED, random_texts

NAME = "tekken-240911"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(NAME, tmp_path_factory.mktemp("vocab") / "tekken.gguf")


@pytest.fixture(scope="module")
def tekken(path: Path) -> Tokenizer:
    return Tokenizer.from_gguf(path)


def test_ids_are_those_of_mistral_common(tekken: Tokenizer) -> None:
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    theirs = Tekkenizer.from_file(data_file(NAME))
    for text in [*HAND_PICKED, *random_texts(6, 2000)]:
        assert tekken.encode(text, bos=True) == theirs.encode(text, bos=True, eos=False), text


def test_ids_are_those_of_llama_cpp_in_text_without_combining_marks(tekken: Tokenizer, path: Path) -> None:
    """llama.cpp's pattern for tekken has no combining marks; the model's own, which is ours, has."""
    texts = [
        "Hello, World! iPhone 15 costs 1,000 €\n\n  ok",
        "ça va très bien, merci",
        "中文。日本語 한국어 🤖👍🏽",
    ]
    with LlamaCppVocab(path) as peer:
        for text in texts:
            assert tekken.encode(text, bos=True) == peer.encode(text, bos=True)
        named = "[INST]hi[/INST]<s></s>[TOOL_CALLS]"
        assert tekken.encode(named, special=True) == peer.encode(named, special=True)
        assert [tekken.token_bytes(i) for i in range(tekken.vocab_size)] == [
            peer.piece(i) for i in range(tekken.vocab_size)
        ]


def test_text_comes_back(tekken: Tokenizer) -> None:
    for text in [*HAND_PICKED, *random_texts(7, 500)]:
        assert tekken.decode(tekken.encode(text, bos=True)) == text
