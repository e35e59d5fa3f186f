"""The vocabulary files of llama.cpp's sources: real models' tokenizers, each against llama.cpp itself."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine.models.gguf import GGUFFile, open_gguf
from quengine.models.tokenizer import Tokenizer, TokenizerError
from quengine.models.tokenizer.pre_tokenizers import NEW_IN_UNICODE_16
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, marked_texts, random_texts

SUPPORTED = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("gpt-neox", "llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
WORDPIECE = ("bert-bge",)
"""As in transformers, a word of more than 100 characters is unknown, which llama.cpp cuts."""
UNIGRAM = ("nomic-bert-moe",)
"""Held to `transformers` in test_tokenizer_unigram.py, from which llama.cpp differs on marks."""
# Texts that are special tokens somewhere; each file's own come to them.
MARKS = ["</s>", "<s>", "<unk>", "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<eos>", "<0x0A>"]
# Qwen's published pattern (tokenization_qwen.py of its first model, and tokenizer.json of the later ones).
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_SEPARATOR = "\n__ggml_vocab_test__\n"
pytestmark = pytest.mark.filterwarnings("ignore:.*no tokenizer.ggml.pre")


def vocab_file(name: str) -> Path:
    return llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"


def special_texts(file: GGUFFile, tokenizer: Tokenizer) -> list[str]:
    """MARKS and up to 60 of the unknown, control and user-defined tokens of the file."""
    types = file.metadata.get("tokenizer.ggml.token_type", ())
    found = [tokenizer.token_text(i) for i, kind in enumerate(types) if kind in (2, 3, 4)]
    return MARKS + (found if len(found) <= 60 else random.Random(0).sample(found, 60))


def published_pairs(path: Path) -> Iterator[tuple[str, list[int]]]:
    """Texts and their ids beside the file, as the model's own tokenizer gave them to llama.cpp's developers."""
    texts, ids = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
    if texts.is_file():
        lines = ids.read_text().splitlines()
        pieces = texts.read_bytes().decode().removesuffix(_SEPARATOR).split(_SEPARATOR)
        assert len(pieces) == len(lines) > 30
        yield from ((text, [int(i) for i in line.split()]) for text, line in zip(pieces, lines, strict=True))


def test_every_vocabulary_file_is_here() -> None:
    found = {path.name for path in (llama_cpp_source() / "models").glob("*.gguf")}
    assert found == {vocab_file(name).name for name in (*SUPPORTED, *WORDPIECE, *UNIGRAM)}


@pytest.mark.parametrize("name", WORDPIECE)
def test_ids_are_those_of_the_models_own_tokenizer(name: str) -> None:
    ours, pairs = Tokenizer.from_gguf(vocab_file(name)), list(published_pairs(vocab_file(name)))
    assert pairs and all(ours.encode(text) == ids for text, ids in pairs)


@pytest.mark.parametrize("name", SUPPORTED)
def test_ids_bytes_and_ends_are_those_of_llama_cpp(name: str) -> None:
    path = vocab_file(name)
    file = open_gguf(path)
    ours = Tokenizer.from_gguf(file)
    for text, ids in published_pairs(path):
        assert ours.encode(text) == ids, text
    with LlamaCppVocab(path) as peer:
        assert ours.eos_ids == peer.end_of_generation()
        for text in [*HAND_PICKED, *random_texts(41, 100), *marked_texts(42, 200, special_texts(file, ours))]:
            for special in (False, True):
                assert ours.encode(text, special=special) == peer.encode(text, special=special), text
        for i in [
            *range(300),
            *range(300, ours.vocab_size, 11),
            *range(ours.vocab_size - 300, ours.vocab_size),
        ]:
            theirs = peer.piece(i)
            # llama.cpp writes this for tokens that are not spelled in the byte alphabet.
            assert ours.token_bytes(i) == theirs or theirs.startswith(b"[UNK_BYTE_"), i


def test_a_kind_that_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    path = GGUFBuilder().kvs({"tokenizer.ggml.model": "rwkv"}).write(tmp_path / "m.gguf")
    with pytest.raises(TokenizerError) as raised:
        Tokenizer.from_gguf(path)
    assert "tokenizer model 'rwkv' (RWKV) is not supported" in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def qwen2() -> Tokenizer:
    return Tokenizer.from_gguf(vocab_file("qwen2"))


def test_ids_of_qwen_2_are_those_of_tiktoken(qwen2: Tokenizer) -> None:
    import tiktoken

    ours = qwen2
    ranks = {ours.token_bytes(i): i for i in range(151643)}
    theirs = tiktoken.Encoding("qwen2", pat_str=QWEN_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in [*HAND_PICKED, *random_texts(43, 700), *marked_texts(44, 700, MARKS)]:
        if not differs_by_unicode(text):
            assert ours.encode(text) == theirs.encode(text, disallowed_special=()), text


def differs_by_unicode(text: str) -> bool:
    """Whether tiktoken splits `text` otherwise than llama.cpp: it has Unicode 16, and a long s in contractions."""
    spans = [span.partition("-") for span in NEW_IN_UNICODE_16.split()]
    later = [(int(low, 16), int(high or low, 16)) for low, _, high in spans]
    return "'ſ" in text or any(low <= ord(c) <= high for c in text for low, high in later)


def test_an_end_mark_among_qwens_merges_is_a_token_where_asked_and_text_else(qwen2: Tokenizer) -> None:
    ours = qwen2
    assert "</s >" in open_gguf(vocab_file("qwen2")).metadata["tokenizer.ggml.merges"]
    assert ours.token_text(128247) == "</s>"
    assert ours.encode("a</s>b", special=True)[1] == 128247
    assert 151645 not in ours.encode("<|im_end|>")
    assert [ours.token_text(i) for i in ours.encode("</s>")] == [
        "</",
        "s",
        ">",
    ]  # its pattern keeps them apart


def test_phi_3_takes_white_space_off_behind_special_tokens() -> None:
    ours = Tokenizer.from_gguf(vocab_file("phi-3"))
    user, end = ours.encode("<|user|>", special=True) + ours.encode("<|end|>", special=True)
    word = ours.encode("hi")
    assert ours.encode("<|user|> \n hi<|end|>\n", special=True) == [user, *word, end]
    assert ours.encode_hidden("<|user|> \n hi<|end|>\n", str) == [user, *word, end]
    kept = ours.encode("<s> hi", special=True)
    assert kept == [ours.bos_id, *ours.encode(" hi")] != [ours.bos_id, *word]
