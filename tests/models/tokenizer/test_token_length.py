"""The least tokens that a text can have, against the tokens that llama.cpp and transformers' library cut it into."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from quengine.models.hub.hub import resolve_model
from quengine.models.tokenizer import Tokenizer
from quengine.models.tokenizer.bpe import BYTE_TO_CHAR
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, random_texts

VOCABULARIES = ("smollm2-135m", "llama-spm", "llama-bpe", "falcon")


def file_of(name: str) -> Path:
    return resolve_model(name) if name.startswith("smollm2") else (
        llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    )  # fmt: skip


def texts_of(tokenizer: Tokenizer) -> list[str]:
    """Of every kind of character, and of the longest tokens, which come nearest to the bound."""
    by_length = sorted(range(tokenizer.vocab_size), key=lambda i: -len(tokenizer.token_bytes(i)))
    longest = [tokenizer.token_bytes(i).decode(errors="ignore") for i in by_length[:10]]
    rng = random.Random(1)
    controls = ["".join(chr(rng.randrange(32)) for _ in range(50)) for _ in range(20)]
    return [
        *HAND_PICKED,
        *random_texts(7, 150),
        *controls,
        *longest,
        *(text * 30 for text in longest),
        " " * 5000,
    ]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_no_text_has_fewer_tokens_in_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer.from_gguf(file_of(name))
    length = tokenizer.token_length
    assert length is not None
    with LlamaCppVocab(file_of(name)) as peer:
        for text in texts_of(tokenizer):
            for special in (False, True):
                assert length.least_tokens(text) <= len(peer.encode(text, special=special)), text


def test_the_bound_is_of_use() -> None:
    length = Tokenizer.from_gguf(file_of("smollm2-135m")).token_length
    assert length is not None and length.longest == 81
    assert length.least_tokens("1" * 4_000_000) == 49383
    assert length.least_tokens("\x04" * 100) == 0, "SmolLM2 has no token for this byte"


def folder(path: Path, **changes: Any) -> Path:
    """A Hugging Face folder of a byte-level tokenizer that merges little."""
    alphabet = {char: i for i, char in enumerate(BYTE_TO_CHAR)}
    merged = {"Ġt": 256, "he": 257, "Ġthe": 258, "\u0120\u0120": 259}
    model = {"type": "BPE", "vocab": alphabet | merged, "merges": ["Ġ t", "h e", "Ġt he", "Ġ Ġ"]}
    parts = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "use_regex": True,
            "trim_offsets": True,
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True, "trim_offsets": True},
        "model": model,
    }
    path.mkdir(exist_ok=True)
    (path / "tokenizer.json").write_text(json.dumps(parts | changes))
    return path


SHRINKING = [
    "\u1fbe\u0308\u0301" * 50,
    "e\u0301" * 100,
    "\u212a" * 100,
    "\u1112\u1161\u11ab" * 50,
    "\u212b" * 99,
]


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}, {"type": "NFD"}], ids=["none", "NFC", "NFD"])
def test_no_text_has_fewer_tokens_in_a_tokenizer_json(
    tmp_path: Path, normalizer: dict[str, str] | None
) -> None:
    path = folder(tmp_path, normalizer=normalizer)
    length = Tokenizer.from_hf(path).token_length
    library = Library.from_file(str(path / "tokenizer.json"))
    assert length is not None and length.longest == (4 if normalizer is None else 16)
    for text in [*HAND_PICKED, *random_texts(3, 200), *SHRINKING, " the" * 100]:
        assert length.least_tokens(text) <= len(library.encode(text, add_special_tokens=False).ids), text


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aaaa"}, "content": "a"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
        {"added_tokens": [{"id": 300, "content": "<x>", "single_word": False, "lstrip": True, "rstrip": False,
                           "normalized": False, "special": True}]},
    ],
    ids=lambda changes: str(next(iter(changes.values())))[:40],
)  # fmt: skip
def test_a_tokenizer_that_may_drop_text_has_no_bound(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert Tokenizer.from_hf(folder(tmp_path, **changes)).token_length is None
