"""Vocabulary-only GGUF files of Mistral's real tokenizers, made from the files inside mistral-common.

Written as llama.cpp's converter lays them out, with the tests' own builder.
"""

import base64
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from struct import unpack

from tests.gguf_builder import GGUFBuilder, byte_level_alphabet

SENTENCEPIECE = {
    "v1": "tokenizer.model.v1",
    "v2": "mistral_instruct_tokenizer_240216.model.v2",
    "v3": "mistral_instruct_tokenizer_240323.model.v3",
    "v7": "mistral_instruct_tokenizer_241114.model.v7",
}
TEKKEN = {"tekken-240718": "tekken_240718.json", "tekken-240911": "tekken_240911.json"}


def data_file(name: str) -> Path:
    """A tokenizer file of mistral-common by its short name."""
    return Path(str(files("mistral_common"))) / "data" / (SENTENCEPIECE | TEKKEN)[name]


def write_vocabulary(name: str, path: Path) -> Path:
    """Writes the tokenizer `name` as a GGUF without tensors."""
    entries = _scored(data_file(name)) if name in SENTENCEPIECE else _tekken(data_file(name))
    types = entries.pop("tokenizer.ggml.token_type")
    builder = GGUFBuilder().kv("general.architecture", "llama").kvs(entries)
    return builder.kv("tokenizer.ggml.token_type", types, "int32").write(path)


def _protobuf_fields(raw: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value) of one protobuf message; sentencepiece's own parser wants protobuf installed."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = raw[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(raw):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
            continue
        size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
        yield tag >> 3, raw[at : at + size]
        at += size


def _scored(path: Path) -> dict[str, object]:
    """`ModelProto.pieces` (field 1): piece (1), score (2), type (3, 1 by default); GGUF's types are the same."""
    pieces = [dict(_protobuf_fields(v)) for f, v in _protobuf_fields(path.read_bytes()) if f == 1]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [p[1].decode() for p in pieces],
        "tokenizer.ggml.scores": [unpack("<f", p[2])[0] for p in pieces],
        "tokenizer.ggml.token_type": [p.get(3, 1) for p in pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def _tekken(path: Path) -> dict[str, object]:
    """Control tokens first, then the byte-level tokens in order of rank, with the merges that give them."""
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    data = json.loads(path.read_text())
    config = data["config"]
    control = config["default_num_special_tokens"]
    alphabet = byte_level_alphabet()
    raw = [
        base64.b64decode(t["token_bytes"]) for t in data["vocab"][: config["default_vocab_size"] - control]
    ]
    named = {t["rank"]: t["token_str"] for t in Tekkenizer.DEPRECATED_SPECIAL_TOKENS}
    specials = [str(named.get(i, f"<SPECIAL_{i}>")) for i in range(control)]
    spelled = ["".join(alphabet[b] for b in token) for token in raw]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": specials + spelled,
        "tokenizer.ggml.token_type": [3] * control + [1] * len(raw),
        "tokenizer.ggml.merges": _merges(spelled),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
    }


def _merges(spelled: list[str]) -> list[str]:
    """All cuts of each token into two tokens, ordered by its rank, as transformers converts tiktoken files."""
    rank = {token: i for i, token in enumerate(spelled)}
    merges = []
    for token in spelled:
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [(a, b) for a, b in cuts if a in rank and b in rank]
        merges += [f"{a} {b}" for a, b in sorted(known, key=lambda cut: (rank[cut[0]], rank[cut[1]]))]
    return merges
