"""Tokenizers of encoders as keys of a GGUF file: WordPiece, and SentencePiece's unigram model, from tokenizer.json.

Text and type of each token follow llama.cpp's converter. That converter finds the name of WordPiece's pre-tokenizer by
a hash, as for others. Nothing depends on this name; here it is always the same.
"""

from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.convert.sentencepiece_file import read_spaces
from quengine.models.convert.vocabulary import Writer, add_bpe, add_special_tokens, looks_special, role_texts
from quengine.models.hf.hf_headers import read_config, read_tokenizer_config
from quengine.models.hf.json_file import read_json
from quengine.models.tokenizer.from_hf import read_hf_tokenizer
from quengine.models.tokenizer.vocabulary import TokenType

_SPACE = "\u2581"
_WORDPIECE_PRE = "jina-v2-en"
_MODERN = "modern-bert"
_UNUSED_SCORE = -10000.0


def add_encoder_vocabulary(writer: Writer, folder: Path, config: ModelConfig) -> None:
    """Adds `tokenizer.*`.

    Raises:
        EngineError: there is no tokenizer.json, or it is damaged or of another kind.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"{folder} has no tokenizer.json, of which an encoder's tokenizer is converted")
    read_hf_tokenizer(folder)  # checks what is read here without a check
    parts = read_json(path)
    kind = parts["model"].get("type")
    if kind == "WordPiece":
        _add_wordpiece(writer, path, parts, config.vocab_size)
    elif kind == "Unigram":
        _add_unigram(writer, path, parts, config.vocab_size)
    else:
        add_bpe(writer, folder, config.vocab_size)
        for role in ("bos", "eos", "sep") if config.architecture == _MODERN else ():
            if (key := f"tokenizer.ggml.add_{role}_token") not in writer.kv_data[0]:
                writer.add_bool(key, True)
    if config.architecture != _MODERN:
        types = read_config(folder).get("type_vocab_size")
        assert config.encoder is not None
        writer.add_token_type_count(config.encoder.token_types if types is None else types)


def _add_wordpiece(writer: Writer, path: Path, parts: Mapping[str, Any], rows: int) -> None:
    """The vocabulary as llama.cpp has it: tokens that begin a word have a space's mark, those that continue one have
    none."""
    texts, types = [f"[PAD{i}]" for i in range(rows)], [TokenType.UNUSED] * rows
    _check_rows(path, parts, parts["model"]["vocab"].values(), rows)
    for text, i in parts["model"]["vocab"].items():
        texts[i], types[i] = text, TokenType.NORMAL
    for token in parts.get("added_tokens", ()):
        i, text = token["id"], token["content"]
        control = token.get("special") or looks_special(text)
        texts[i], types[i] = text, TokenType.CONTROL if control else TokenType.USER_DEFINED
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre(_WORDPIECE_PRE)
    writer.add_token_list([_marked(text, kind) for text, kind in zip(texts, types, strict=True)])
    writer.add_token_types(types)
    add_special_tokens(writer, path.parent, n_vocab=rows)
    _add_normalizer(writer, parts.get("normalizer"))


def _add_normalizer(writer: Writer, normalizer: Any) -> None:
    """Keys for the normalization of letters and accents, as newer releases of the `gguf` package write them."""
    given = normalizer or {}
    found = {"lowercase": given.get("lowercase"), "strip_accents": given.get("strip_accents")}
    if given.get("type") != "BertNormalizer":
        found = {"lowercase": given.get("type") == "Lowercase" or None}
    for each in given.get("normalizers") or ():
        _add_normalizer(writer, each)
    for name, value in found.items():
        key = f"tokenizer.ggml.normalizer.{name}"
        if value is not None and key not in writer.kv_data[0]:
            writer.add_bool(key, value)


def _marked(text: str, kind: TokenType) -> str:
    if kind == TokenType.CONTROL:
        return text
    return text[2:] if text.startswith("##") else _SPACE + text


def _add_unigram(writer: Writer, path: Path, parts: Mapping[str, Any], rows: int) -> None:
    pieces, settings = parts["model"]["vocab"], read_tokenizer_config(path.parent)
    _check_rows(path, parts, range(len(pieces)), rows)
    texts: list[bytes] = [f"[PAD{i}]".encode() for i in range(rows)]
    scores, types = [_UNUSED_SCORE] * rows, [TokenType.UNUSED] * rows
    special = role_texts(settings)
    added = {token["id"]: token["content"] for token in parts.get("added_tokens", ())}
    unknown = {text: i for i, text in added.items()}.get(
        settings.get("unk_token"), parts["model"].get("unk_id", 3)
    )
    for i, (text, score) in enumerate(pieces):
        texts[i], scores[i] = text.encode(), score
        if i == unknown:
            types[i] = TokenType.UNKNOWN
        elif text in special:
            types[i] = TokenType.CONTROL
        else:
            types[i] = TokenType.USER_DEFINED if i in added else TokenType.NORMAL
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    spaces = path.with_name("sentencepiece.bpe.model")
    prefix, without = read_spaces(spaces) if spaces.is_file() else _spaces(settings)
    writer.add_add_space_prefix(prefix)
    writer.add_remove_extra_whitespaces(without)
    if charsmap := _charsmap(path, parts.get("normalizer")):
        writer.add_precompiled_charsmap(charsmap)
    add_special_tokens(writer, path.parent, n_vocab=rows)


def _spaces(settings: Mapping[str, Any]) -> tuple[bool, bool]:
    """Keys for the treatment of spaces, for a folder without SentencePiece's own file."""
    return bool(settings.get("add_prefix_space", True)), bool(
        settings.get("clean_up_tokenization_spaces", False)
    )


def _charsmap(path: Path, normalizer: Any) -> bytes:
    """The table by which SentencePiece normalizes text, of a normalizer or of one of a sequence of them."""
    each = [normalizer or {}, *((normalizer or {}).get("normalizers") or ())]
    found = next((one["precompiled_charsmap"] for one in each if one.get("type") == "Precompiled"), None)
    if found is None:
        raise EngineError(f"{path}: a unigram model without SentencePiece's table of characters")
    return b64decode(found or "")


def _check_rows(path: Path, parts: Mapping[str, Any], ids: Any, rows: int) -> None:
    largest = max((*ids, *(token["id"] for token in parts.get("added_tokens", ()))), default=-1)
    if largest >= rows:
        raise EngineError(f"{path}: token {largest}, of a model with {rows} rows of embedding")
