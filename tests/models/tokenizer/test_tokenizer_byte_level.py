"""Byte-level BPE against llama.cpp on the real SmolLM2 vocabulary: words, merges, bytes, roles."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.models.hub.hub import resolve_model
from quengine.models.tokenizer import Tokenizer
from quengine.models.tokenizer.bpe import BYTE_TO_CHAR, byte_level_bytes
from tests.gguf_builder import GGUFBuilder, bpe_vocabulary, byte_level_alphabet
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, random_texts


@pytest.fixture(scope="module")
def smollm() -> Tokenizer:
    return Tokenizer.from_gguf(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def peer() -> Iterator[LlamaCppVocab]:
    with LlamaCppVocab(resolve_model("smollm2-135m")) as vocab:
        yield vocab


@pytest.mark.parametrize("special", [False, True])
def test_ids_are_those_of_llama_cpp(smollm: Tokenizer, peer: LlamaCppVocab, special: bool) -> None:
    for text in [*HAND_PICKED, *random_texts(1, 3000)]:
        assert smollm.encode(text, bos=True, special=special) == peer.encode(
            text, bos=True, special=special
        ), text


def test_token_bytes_and_ends_of_generation_are_those_of_llama_cpp(
    smollm: Tokenizer, peer: LlamaCppVocab
) -> None:
    assert [smollm.token_bytes(i) for i in range(smollm.vocab_size)] == [
        peer.piece(i) for i in range(smollm.vocab_size)
    ]
    assert smollm.eos_ids == peer.end_of_generation()


@settings(deadline=None, max_examples=200, derandomize=True)
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


def end_mark_vocabulary(path: Path, kind: int) -> Tokenizer:
    """A vocabulary with `</s>` of token type `kind` and the merges that make it, in words that may spell it whole."""
    tokens = [*byte_level_alphabet(), "</", "s>", "</s>"]
    values = bpe_vocabulary() | {
        "tokenizer.ggml.pre": "bloom",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["< /", "s >", "</ s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    values.pop("tokenizer.ggml.token_type")
    types = [1] * (len(tokens) - 1) + [kind]
    builder = GGUFBuilder().kv("general.architecture", "llama").kvs(values)
    return Tokenizer.from_gguf(builder.kv("tokenizer.ggml.token_type", types, "int32").write(path))


def test_a_normal_token_that_merges_make_stays_in_reach_of_text_though_it_reads_as_an_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "v.gguf"
    tokenizer = end_mark_vocabulary(path, kind=1)
    with LlamaCppVocab(path) as peer:
        for text in ("</s>", "a</s>b </s></s>", "<s></s"):
            for special in (False, True):
                assert tokenizer.encode(text, special=special) == peer.encode(text, special=special), text
        assert tokenizer.eos_ids == peer.end_of_generation()
    assert tokenizer.encode("</s>") == [258]


def test_a_control_token_that_merges_make_is_out_of_reach_of_text(tmp_path: Path) -> None:
    """llama.cpp's merging would give it: whoever writes a message would end it."""
    tokenizer = end_mark_vocabulary(tmp_path / "v.gguf", kind=3)
    assert [tokenizer.token_text(i) for i in tokenizer.encode("</s>")] == ["</", "s>"]
    assert tokenizer.encode("</s>", special=True) == [258]


def test_no_pre_tokenizer_means_the_default_one_and_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"tiny\.gguf: no tokenizer\.ggml\.pre"):
        absent = tiny_tokenizer(**{"tokenizer.ggml.pre": None})
    default = tiny_tokenizer(**{"tokenizer.ggml.pre": "default"})
    assert [absent.encode(t) for t in HAND_PICKED] == [default.encode(t) for t in HAND_PICKED]
