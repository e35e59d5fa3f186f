"""Byte-level BPE against llama.cpp on the real SmolLM2 vocabulary: words, merges, bytes, roles."""

from collections.abc import Iterator
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.models.gguf import open_gguf
from quengine.models.hub import resolve_model
from quengine.models.tokenizer import Tokenizer, TokenizerError
from quengine.models.tokenizer.byte_level import BYTE_TO_CHAR, byte_level_bytes
from quengine.models.tokenizer.pre_tokenizers import NEW_IN_UNICODE_16
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary, byte_level_alphabet
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, random_texts

PRE_TOKENIZERS = (
    *(
        "default",
        "llama-bpe",
        "llama3",
        "llama-v3",
        "smollm",
        "qwen2",
        "gpt-2",
        "deepseek-llm",
        "deepseek-coder",
    ),
    *("starcoder", "refact", "command-r", "falcon", "olmo", "dbrx"),
)
# One for each way that patterns use character classes.
DISTINCT = ("smollm", "llama-bpe", "deepseek-llm", "deepseek-coder", "falcon")


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_gguf(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def peer() -> Iterator[LlamaCppVocab]:
    with LlamaCppVocab(resolve_model("smollm2-135m")) as vocab:
        yield vocab


def with_pre_tokenizer(name: str, path: Path) -> Path:
    """SmolLM2's first tokens and merges under another pre-tokenizer's name."""
    metadata = open_gguf(resolve_model("smollm2-135m")).metadata
    merges = metadata["tokenizer.ggml.merges"][:8000]
    tokens = metadata["tokenizer.ggml.tokens"][: 17 + 235 + len(merges)]  # added ones, bytes, merged ones
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    types = [3] * 17 + [1] * (len(tokens) - 17)
    return GGUFBuilder().kvs(values).kv("tokenizer.ggml.token_type", types, "int32").write(path)


def characters() -> Iterator[str]:
    """Both ends of every run of characters of one category, among letters, digits and spaces, 48 to a text.

    The runs are those of Python's Unicode, and of the characters that Unicode 16.0 added. All characters are
    compared by `benchmarks/tokenizer_vs_peers.py --characters`.
    """
    categories = [category(chr(c)) for c in range(0xE0200)]
    starts = {c for c in range(1, 0xE0200) if categories[c] != categories[c - 1]}
    spans = [span.split("-") for span in NEW_IN_UNICODE_16.split()]
    starts |= {int(span[0], 16) for span in spans} | {int(span[-1], 16) + 1 for span in spans}
    codes = sorted({c for start in starts for c in (start - 1, start) if not 0xD800 <= c < 0xE000})
    for first in range(0, len(codes), 48):
        yield "".join(f"a{chr(c)}{chr(c)} {chr(c)}'s1{chr(c)}." for c in codes[first : first + 48])


@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_llama_cpp(smollm: Tokenizer, peer: LlamaCppVocab, special: bool) -> None:
    for text in [*HAND_PICKED, *random_texts(1, 3000)]:
        assert smollm.encode(text, bos=True, special=special) == peer.encode(
            text, bos=True, special=special
        ), text


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_each_pre_tokenizer_splits_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    path = with_pre_tokenizer(name, tmp_path / "vocab.gguf")
    tokenizer = Tokenizer.from_gguf(path)
    with LlamaCppVocab(path) as peer:
        for text in [*HAND_PICKED, *random_texts(2, 200), *(characters() if name in DISTINCT else ())]:
            assert tokenizer.encode(text, bos=True) == peer.encode(text, bos=True), text


def test_token_bytes_and_ends_of_generation_are_those_of_llama_cpp(
    smollm: Tokenizer, peer: LlamaCppVocab
) -> None:
    assert [smollm.token_bytes(i) for i in range(smollm.vocab_size)] == [
        peer.piece(i) for i in range(smollm.vocab_size)
    ]
    assert smollm.eos_ids == peer.end_of_generation()


@settings(deadline=None, max_examples=200)
@given(text=st.text())
def test_text_comes_back(text: str) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def tiny_tokenizer(**changes: object) -> Tokenizer:
    """A vocabulary of all bytes and three merges, from memory through a real file."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        values = {k: v for k, v in {**bpe_vocabulary(), **changes}.items() if v is not None}
        GGUFBuilder().kv("general.architecture", "llama").kvs(values).write(path)
        return Tokenizer.from_gguf(path)


def test_the_byte_alphabet_is_gpt2s() -> None:
    assert byte_level_alphabet() == BYTE_TO_CHAR
    assert byte_level_bytes("".join(BYTE_TO_CHAR)) == bytes(range(256))
    assert byte_level_bytes("Ġ中") == b" " + "中".encode()


def test_a_byte_without_a_token_is_left_out_but_keeps_its_neighbours_apart() -> None:
    vocabulary = bpe_vocabulary(merges=("t h",), special=())
    tokens = [t for t in vocabulary["tokenizer.ggml.tokens"] if t != "Ā"]  # byte 0
    tokenizer = tiny_tokenizer(
        **vocabulary
        | {
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(tokens),
            "tokenizer.ggml.bos_token_id": None,
            "tokenizer.ggml.eos_token_id": None,
        }
    )
    ids = {text: i for i, text in enumerate(tokens)}
    assert tokenizer.encode("th") == [ids["th"]]
    assert tokenizer.encode("t\0h") == [ids["t"], ids["h"]]


def test_a_word_that_is_a_token_is_taken_whole_only_where_merges_are_ignored() -> None:
    tokens = [*byte_level_alphabet(), "ab", "abc"]  # no merge leads to abc
    plain = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    plain |= {"tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 0}
    plain["tokenizer.ggml.eos_token_id"] = 0
    merged = tiny_tokenizer(**plain, **{"tokenizer.ggml.pre": "gpt-2"})
    whole = tiny_tokenizer(**plain, **{"tokenizer.ggml.pre": "llama-bpe"})
    assert [merged.token_text(i) for i in merged.encode("abc")] == ["ab", "c"]
    assert [whole.token_text(i) for i in whole.encode("abc")] == ["abc"]


def test_a_control_token_is_no_word_even_where_merges_are_ignored() -> None:
    vocabulary = bpe_vocabulary(special=("stop",), pre="llama-bpe")
    tokenizer = tiny_tokenizer(**vocabulary)
    stop = tokenizer.vocab_size - 1
    assert tokenizer.is_control(stop)
    assert stop not in tokenizer.encode("stop")
    assert tokenizer.encode("stop", special=True) == [stop]


def test_an_unknown_pre_tokenizer_is_named_with_those_supported() -> None:
    with pytest.raises(
        TokenizerError, match=r"pre-tokenizer 'gpt-9' is not supported; supported: .*llama-bpe"
    ) as raised:
        tiny_tokenizer(**{"tokenizer.ggml.pre": "gpt-9"})
    assert "\n" not in str(raised.value)
    assert "tiny.gguf" in str(raised.value)


def test_no_pre_tokenizer_means_the_default_one_and_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"tiny\.gguf: no tokenizer\.ggml\.pre"):
        absent = tiny_tokenizer(**{"tokenizer.ggml.pre": None})
    default = tiny_tokenizer(**{"tokenizer.ggml.pre": "default"})
    assert [absent.encode(t) for t in HAND_PICKED] == [default.encode(t) for t in HAND_PICKED]
