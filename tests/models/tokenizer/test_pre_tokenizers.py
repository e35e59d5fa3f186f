"""Every pre-tokenizer against llama.cpp, and those that follow the model's own tokenizer against that."""

import re
import time
from functools import cache
from pathlib import Path
from unicodedata import category

import pytest

from quengine.models.gguf import open_gguf
from quengine.models.tokenizer import Tokenizer, TokenizerError
from quengine.models.tokenizer.pre_tokenizers import NEW_IN_UNICODE_16, pre_tokenizer, pre_tokenizer_names
from tests.crossing_vocabulary import write_crossing_vocabulary
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, marked_texts, random_texts

# llama.cpp's patterns for these are not the models' own.
OWN_TOKENIZER = ("tekken", "mistral", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")
# One for each way that patterns use character classes; `benchmarks/checks/tokenizer_vs_peers.py` compares all.
DISTINCT = ("smollm", "llama-bpe", "qwen35", "deepseek-llm", "deepseek-coder", "falcon", "kimi-k2")
# Names that the converter writes for tokenizer kinds without merges.
OTHER_KINDS = {"bert-bge", "bert-bge-large", "jina-v2-en"}
MARKS = ["12345", "'S", "'ll", "<sentinel:12>", "IMGIMGABCZ", "1234567890"]


@cache
def characters() -> list[str]:
    """Both ends of every run of characters of one category, among letters, digits and spaces, 48 to a text.

    The runs are those of Python's Unicode, and of the characters that Unicode 16.0 added. All characters are
    compared by `benchmarks/checks/tokenizer_vs_peers.py --characters`.
    """
    categories = [category(chr(c)) for c in range(0xE0200)]
    starts = {c for c in range(1, 0xE0200) if categories[c] != categories[c - 1]}
    spans = [span.split("-") for span in NEW_IN_UNICODE_16.split()]
    starts |= {int(span[0], 16) for span in spans} | {int(span[-1], 16) + 1 for span in spans}
    codes = sorted({c for start in starts for c in (start - 1, start) if not 0xD800 <= c < 0xE000})
    parts = [f"a{chr(c)}{chr(c)} {chr(c)}'s1{chr(c)}." for c in codes]
    return ["".join(parts[first : first + 48]) for first in range(0, len(parts), 48)]


@pytest.mark.parametrize("name", [name for name in pre_tokenizer_names() if name not in OWN_TOKENIZER])
def test_each_pre_tokenizer_splits_as_in_llama_cpp(name: str, tmp_path: Path) -> None:
    path = write_crossing_vocabulary(name, tmp_path / "vocab.gguf", pre_tokenizer(name).byte_level)
    tokenizer = Tokenizer.from_gguf(path)
    texts = [*HAND_PICKED, *random_texts(21, 60), *marked_texts(22, 60, MARKS)]
    with LlamaCppVocab(path) as peer:
        for text in [*texts, *(characters() if name in DISTINCT else ())]:
            assert tokenizer.encode(text, bos=True) == peer.encode(text, bos=True), text


@pytest.mark.parametrize("name", ["gpt-4o", "llama4", "minimax-m2"])
def test_o200k_splits_as_in_llama_cpp_where_that_knows_the_letters(name: str, tmp_path: Path) -> None:
    """llama.cpp's form of the pattern has case for ASCII letters only, and no combining marks."""
    path = write_crossing_vocabulary(name, tmp_path / "vocab.gguf")
    tokenizer = Tokenizer.from_gguf(path)
    texts = [t for t in [*HAND_PICKED, *random_texts(23, 100), *marked_texts(24, 200, MARKS)] if _plain(t)]
    assert len(texts) > 100
    with LlamaCppVocab(path) as peer:
        for text in texts:
            assert tokenizer.encode(text, bos=True) == peer.encode(text, bos=True), text


def _plain(text: str) -> bool:
    return all(c.isascii() or category(c) not in ("Lu", "Lt", "Mn", "Mc", "Me") for c in text)


def test_o200k_gives_the_ids_of_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pattern that tiktoken publishes, over the ranks of Qwen 2's vocabulary, where ids are ranks."""
    import tiktoken
    import tiktoken_ext.openai_public as published

    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_args, **_more: {})
    pattern = published.o200k_base()["pat_str"]
    source = llama_cpp_source() / "models" / "ggml-vocab-qwen2.gguf"
    ours = Tokenizer.from_gguf(_with_pre(source, "qwen2", "gpt-4o", tmp_path / "vocab.gguf"))
    ranks = {ours.token_bytes(i): i for i in range(151643)}
    theirs = tiktoken.Encoding("o200k", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in [*HAND_PICKED, *random_texts(25, 300), *marked_texts(26, 700, MARKS), *characters()]:
        assert ours.encode(text) == theirs.encode(text, disallowed_special=()), text


def _with_pre(source: Path, old: str, new: str, path: Path) -> Path:
    """A copy of the file `source` whose `tokenizer.ggml.pre` is `new`."""
    key = b"tokenizer.ggml.pre" + (8).to_bytes(4, "little")
    before, after = ((len(name).to_bytes(8, "little") + name.encode()) for name in (old, new))
    raw = source.read_bytes()
    assert raw.count(key + before) == 1
    path.write_bytes(raw.replace(key + before, key + after))
    assert open_gguf(path).metadata["tokenizer.ggml.pre"] == new
    return path


def test_every_name_that_llama_cpps_converter_writes_is_supported() -> None:
    source = (llama_cpp_source() / "conversion" / "base.py").read_text()
    names = set(re.findall(r'\bres = "([^"]+)"', source)) - OTHER_KINDS
    assert len(names) > 70
    assert names - set(pre_tokenizer_names()) == set()


@pytest.mark.parametrize("name", ["whitespace", "gpt-9"])
def test_an_unknown_pre_tokenizer_is_named_with_those_supported(name: str, tmp_path: Path) -> None:
    path = write_crossing_vocabulary(name, tmp_path / "tiny.gguf")
    said = f"pre-tokenizer '{name}' is not supported; supported: .*llama-bpe"
    with pytest.raises(TokenizerError, match=said) as raised:
        Tokenizer.from_gguf(path)
    assert "\n" not in str(raised.value)
    assert "tiny.gguf" in str(raised.value)


@pytest.mark.parametrize("name", ["tiny_aya", "superbpe", "afmoe"])
def test_a_long_run_of_digits_takes_linear_time(name: str, tmp_path: Path) -> None:
    """A lookahead to the end of the run at every group would take minutes."""
    path = write_crossing_vocabulary(name, tmp_path / "vocab.gguf")
    tokenizer = Tokenizer.from_gguf(path)
    digits = "12345678" * 40_000
    start = time.monotonic()
    ids = tokenizer.encode(digits)
    assert time.monotonic() - start < 60
    assert tokenizer.decode(ids) == digits
