"""Unigram: the beginning of XLM-RoBERTa's real vocabulary against `transformers`, from GGUF and as tokenizer.json; maps
of normalizations that lead outside of themselves."""

import json
import unicodedata
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.tokenizer import Tokenizer
from quengine.models.tokenizer.bounded_parts import is_bounded
from quengine.models.tokenizer.charsmap import charsmap_problem
from tests.gguf_builder import GGUFBuilder
from tests.llama_cpp_source import llama_cpp_source
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.text_samples import HAND_PICKED, random_texts

TOKENS = 20_000
CONTROLS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@pytest.fixture(scope="module")
def metadata() -> dict[str, Any]:
    """Of a file with the first tokens of XLM-RoBERTa's, those of its Chinese among them, and its map."""
    with open_gguf(llama_cpp_source() / "models" / "ggml-vocab-nomic-bert-moe.gguf") as file:
        given = dict(file.metadata)
        tokens, scores = list(given["tokenizer.ggml.tokens"]), given["tokenizer.ggml.scores"]
        charsmap = np.array(given["tokenizer.ggml.precompiled_charsmap"])
    kept = [*range(TOKENS - 1), 250001]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [tokens[i] for i in kept],
        "tokenizer.ggml.scores": np.array([scores[i] for i in kept], np.float32),
        "tokenizer.ggml.token_type": np.array([3, 3, 3, 2, *[1] * (TOKENS - 5), 3], np.int32),
        "tokenizer.ggml.precompiled_charsmap": charsmap,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 1,
    }


@pytest.fixture(scope="module")
def theirs(metadata: dict[str, Any]) -> Any:
    from transformers import XLMRobertaTokenizer

    texts, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"].tolist()
    charsmap = metadata["tokenizer.ggml.precompiled_charsmap"].tobytes()
    return XLMRobertaTokenizer(
        vocab=list(zip(texts, scores, strict=True)), _spm_precompiled_charsmap=charsmap
    )


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unigram") / "folder"
    theirs.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def from_gguf(metadata: dict[str, Any], folder: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFBuilder().kvs(metadata).write(folder.with_name("m.gguf")))


def hostile_texts() -> list[str]:
    found = [
        *HAND_PICKED,
        *random_texts(3, 400),
        "a \u2581b\u2581\u2581 c",
        "\u0130\ufb01\ufdfa\uff21 \u1100\u1161",
    ]
    return [text for text in found if not any(control in text for control in CONTROLS)]


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_ids_are_those_of_transformers(kind: str, theirs: Any, from_gguf: Tokenizer, folder: Path) -> None:
    ours = from_gguf if kind == "gguf" else Tokenizer.from_hf(folder)
    assert ours.add_bos and ours.end_of_text == 2
    for text in hostile_texts():
        assert [*ours.encode(text, bos=True), 2] == theirs(text)["input_ids"], text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=60))
def test_ids_of_any_text_are_those_of_transformers(theirs: Any, from_gguf: Tokenizer, text: str) -> None:
    if not any(control in text for control in CONTROLS):
        assert from_gguf.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]


def test_ids_are_llama_cpps_but_of_marks(from_gguf: Tokenizer, folder: Path) -> None:
    """Like SentencePiece, llama.cpp maps several characters together that `tokenizers` maps one by one, and the other
    way around: both only where a letter has marks behind it, or is a jamo."""
    compared = 0
    with LlamaCppVocab(folder.with_name("m.gguf")) as peer:
        for text in hostile_texts():
            kinds = {unicodedata.category(char)[0] for char in text if char not in "\t\n\r"}
            if kinds & {"M", "C"} or "\u1100" in unicodedata.normalize("NFKD", text) or "\u2581" in text:
                continue
            compared += 1
            assert from_gguf.encode(text) == peer.encode(text, bos=False, special=False), text
    assert compared > 40


def test_a_control_token_in_a_text_is_text(from_gguf: Tokenizer) -> None:
    assert not {0, 1, 2, TOKENS - 1} & set(from_gguf.encode("a </s> <pad><s> <mask>"))
    assert from_gguf.encode("a</s>b", special=True)[1] == 2
    assert from_gguf.decode(from_gguf.encode("the cat sat")) == "the cat sat"


def test_without_its_prefix_or_merging_spaces_are_kept(metadata: dict[str, Any], tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.remove_extra_whitespaces": False}
    path = GGUFBuilder().kvs({**metadata, **keys}).write(tmp_path / "m.gguf")
    ours = Tokenizer.from_gguf(path)
    with LlamaCppVocab(path) as peer:
        for text in ("the cat", " the  cat ", "a  \t b"):
            assert ours.encode(text) == peer.encode(text, bos=False, special=False), text


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"scores": None}, "missing, and tokenizer model 't5' chooses by score"),
        ({"unknown_token_id": 4_000_000}, "4000000 is not a token"),
        ({"precompiled_charsmap": np.zeros(3, np.uint8)}, "a trie of 0 bytes in 3"),
        ({"precompiled_charsmap": np.zeros(3, np.int32)}, "is not an array of bytes"),
    ],
)
def test_what_is_damaged_is_refused(
    metadata: dict[str, Any], tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    keys = {**metadata, **{f"tokenizer.ggml.{key}": value for key, value in change.items()}}
    path = GGUFBuilder().kvs({k: v for k, v in keys.items() if v is not None}).write(tmp_path / "m.gguf")
    with pytest.raises(GGUFError, match=problem):
        Tokenizer.from_gguf(path)


def test_a_map_that_leads_outside_is_found(metadata: dict[str, Any]) -> None:
    """The library's process would end where it follows one."""
    raw = metadata["tokenizer.ggml.precompiled_charsmap"].tobytes()
    assert charsmap_problem(raw) is None
    size = int.from_bytes(raw[:4], "little")
    units = np.frombuffer(raw, "<u4", size // 4, 4)
    far = units.copy()
    far[0] |= 0x7FFFFC00
    assert "the trie leads to unit" in str(charsmap_problem(raw[:4] + far.tobytes() + raw[4 + size :]))
    cut = (8).to_bytes(4, "little") + raw[4:12] + b"a\0"
    assert "the trie leads to unit" in str(charsmap_problem(cut))
    assert "a replacement of 300 bytes" in str(charsmap_problem(raw + b"a" * 300))
    assert "not UTF-8" in str(charsmap_problem(raw + b"\xff"))
    short = raw[: 4 + size] + b"a\0"
    assert "no beginning of a replacement" in str(charsmap_problem(short))
    part = {"type": "Precompiled", "precompiled_charsmap": b64encode(raw).decode()}
    model = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}
    assert is_bounded(json.loads(json.dumps({"model": model, "normalizer": part})))
    part["precompiled_charsmap"] = b64encode(short).decode()
    assert not is_bounded({"model": model, "normalizer": part})
