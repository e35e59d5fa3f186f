"""The tokenizer of a folder as keys of a GGUF file: byte-level BPE (tokenizer.json), or SentencePiece's BPE
(tokenizer.model).

Text and type of each token follow llama.cpp's converter. That converter finds the name of a byte-level pre-tokenizer by
a hash of a tokenized text, and so only for released models. Here it is the name of the pre-tokenizer that splits a text
as the folder's does (`pre_tokenizer_name`).
"""

import re
from array import array
from collections.abc import Mapping
from functools import cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.config import ModelConfig
from quengine.models.convert.sentencepiece_file import read_pieces
from quengine.models.hf.hf_headers import read_config, read_tokenizer_config
from quengine.models.hf.json_file import read_json
from quengine.models.tokenizer.from_hf import read_hf_tokenizer
from quengine.models.tokenizer.vocabulary import TokenType

Writer = Any

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPACE = "\u2581"
_LLAMA_LIKE = ("llama", "smollm3", "granite", "granitemoe")
_CHAT_ROLES = {"eot": "<|user|>", "unknown": "<|endoftext|>"}
_GLM_MOE_ROLES = {**_CHAT_ROLES, "bos": "[gMASK]", "eom": "<|observation|>"}
_GLM_ROLES = {
    "glm4": {**_CHAT_ROLES, "bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    "glm4_moe": _GLM_MOE_ROLES,
    "glm4_moe_lite": _GLM_MOE_ROLES,
}
"""Model type -> role -> text of the token."""

_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_VISIBLE = frozenset(
    (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<tool_response|>",
        '<|"|>',
    )
)
"""Gemma 4's tokens of channels and calls, which are text for the caller."""

_GRANITE_ROWS, _CODE_LLAMA_ROWS = 49152, 32016


def add_vocabulary(writer: Writer, folder: Path, config: ModelConfig) -> None:
    """Adds `tokenizer.*`.

    Raises:
        EngineError: there is neither file, or the tokenizer is of another kind.
    """
    llama = config.architecture in _LLAMA_LIKE
    space = read_tokenizer_config(folder).get("add_prefix_space")
    if llama and isinstance(space, bool):
        writer.add_add_space_prefix(space)
    if config.architecture == "gemma4" and _has_byte_fallback(folder):
        _add_gemma4(writer, folder, config.vocab_size)
    elif (folder / "tokenizer.model").is_file():
        _add_sentencepiece(writer, folder, config.vocab_size)
    else:
        add_bpe(writer, folder, config.vocab_size)
    _add_glm_roles(writer, folder)
    _add_suppressed(writer, folder, config.vocab_size)
    if config.architecture == "hunyuan-dense" and isinstance(
        end := read_config(folder).get("eod_token_id"), int
    ):
        writer.kv_data[0].pop("tokenizer.ggml.eos_token_id", None)
        writer.add_eos_token_id(end)
    if config.architecture.startswith("gemma") and (folder / "tokenizer.model").is_file():
        writer.add_add_space_prefix(False)
    if llama and config.vocab_size == _GRANITE_ROWS:
        writer.add_add_bos_token(False)
    if llama and config.vocab_size == _CODE_LLAMA_ROWS:
        raise EngineError(f"{folder}: Code Llama's tokenizer is not converted yet")


def add_special_tokens(writer: Writer, folder: Path, **settings: Any) -> None:
    """Adds the ids of tokens with roles, the chat template and merges, as the `gguf` package reads them.

    settings: its own. Raises EngineError for an id or a template that is none.
    """
    from gguf import SpecialVocab

    try:
        SpecialVocab(folder, **settings).add_to_gguf(writer)
    except ValueError as error:
        raise EngineError(f"{folder}: {error}") from None


def _add_suppressed(writer: Writer, folder: Path, rows: int) -> None:
    """The tokens that Gemma 4 12B never generates."""
    path = folder / "generation_config.json"
    if read_config(folder).get("model_type") != "gemma4_unified" or not path.is_file():
        return
    if tokens := read_json(path).get("suppress_tokens"):
        if not isinstance(tokens, list) or not all(type(i) is int and 0 <= i < rows for i in tokens):
            raise EngineError(f"{path}: suppress_tokens: must be ids from 0 to {rows - 1}")
        writer.add_array("tokenizer.ggml.suppress_tokens", tokens)


def _add_glm_roles(writer: Writer, folder: Path) -> None:
    """The roles of GLM's tokens, which its folders do not say."""
    roles = _GLM_ROLES.get(str(read_config(folder).get("model_type")))
    if roles is None:
        return
    added = {
        token["content"]: token["id"]
        for token in read_json(folder / "tokenizer.json").get("added_tokens", ())
    }
    for role, text in roles.items():
        key = f"tokenizer.ggml.{role}_token_id"
        if key in writer.kv_data[0]:
            continue
        if text not in added:
            raise EngineError(f"{folder / 'tokenizer.json'}: no token {text}, which is GLM's {role}")
        writer.add_uint32(key, added[text])


def _has_byte_fallback(folder: Path) -> bool:
    path = folder / "tokenizer.json"
    return path.is_file() and bool((read_json(path).get("model") or {}).get("byte_fallback"))


def _add_gemma4(writer: Writer, folder: Path, rows: int) -> None:
    """Gemma 4's own kind: merges of characters, and bytes where a character is no token."""
    path = folder / "tokenizer.json"
    parts = read_json(path)
    model = parts["model"]
    if model.get("type") != "BPE":
        raise EngineError(f"{path}: its model is {model.get('type')}, not BPE with byte fallback")
    read_hf_tokenizer(folder)  # checks what is read here without a check
    base, special = dict(model["vocab"]), role_texts(read_tokenizer_config(folder))
    added = {token["content"]: token["id"] for token in parts.get("added_tokens", ())}
    ids = {i: text for text, i in {**base, **added}.items()}
    if sorted(ids) != list(range(rows)):
        raise EngineError(
            f"{path}: {len(ids)} tokens up to {max(ids, default=0)}, of a model with {rows} rows of embedding"
        )
    types = []
    for i in range(len(ids)):
        text = ids[i]
        if _BYTE.fullmatch(text):
            types.append(TokenType.BYTE)
        elif text in _VISIBLE:
            types.append(TokenType.USER_DEFINED)
        elif text in special:
            types.append(TokenType.CONTROL)
        else:
            types.append(TokenType.NORMAL if text in base else TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gemma4")
    writer.add_token_list([ids[i] for i in range(len(ids))])
    writer.add_token_scores([-1000.0] * len(ids))
    writer.add_token_types(types)
    add_special_tokens(writer, folder, load_merges=True)
    writer.add_add_space_prefix(False)
    writer.add_add_bos_token(True)


def add_bpe(writer: Writer, folder: Path, rows: int) -> None:
    """Byte-level BPE from tokenizer.json. Raises EngineError: there is none, or it is of another kind."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise EngineError(f"{folder} has neither tokenizer.json nor tokenizer.model")
    parts = read_json(path)
    texts, types = _bpe_tokens(path, parts, folder, rows)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer_name(path, parts))
    writer.add_token_list(texts)
    writer.add_token_types(types)
    add_special_tokens(writer, folder, load_merges=True)


def _bpe_tokens(
    path: Path, parts: Mapping[str, Any], folder: Path, rows: int
) -> tuple[list[str], list[TokenType]]:
    model = parts.get("model") or {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        kind = "BPE with byte fallback" if model.get("byte_fallback") else model.get("type")
        raise EngineError(f"{path}: its model is {kind}, not byte-level BPE, and there is no tokenizer.model")
    read_hf_tokenizer(folder)  # checks what is read here without a check
    texts, types = [f"[PAD{i}]" for i in range(rows)], [TokenType.UNUSED] * rows
    largest = max((*model["vocab"].values(), *(token["id"] for token in parts.get("added_tokens", ()))))
    if largest >= rows:
        raise EngineError(f"{path}: token {largest}, of a model with {rows} rows of embedding")
    for text, i in model["vocab"].items():
        texts[i], types[i] = text, TokenType.NORMAL
    special = role_texts(read_tokenizer_config(folder))
    for token in parts.get("added_tokens", ()):
        i, text = token["id"], token["content"]
        if token.get("special") or text in special or looks_special(text):
            texts[i], types[i] = text, TokenType.CONTROL
        else:
            texts[i], types[i] = text.replace(_SPACE, " "), TokenType.USER_DEFINED
    return texts, types


def role_texts(config: Mapping[str, Any]) -> set[str]:
    """Texts of the tokens that tokenizer_config.json gives a role, which makes them special."""
    values = [config.get(role) for role in _ROLES] + list(config.get("additional_special_tokens") or ())
    texts = [value.get("content") if isinstance(value, dict) else value for value in values]
    return {text for text in texts if isinstance(text, str)}


def looks_special(text: str) -> bool:
    """Whether a text looks like that of a control token, for tokens that folders do not mark as control tokens."""
    if text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]"):
        return True
    ends = (("<|", "|>"), ("<\uff5c", "\uff5c>"), ("<unused", ">"))
    return any(text.startswith(first) and text.endswith(last) for first, last in ends)


def _add_sentencepiece(writer: Writer, folder: Path, rows: int) -> None:
    texts: list[bytes] = [f"[PAD{i}]".encode() for i in range(rows)]
    scores, types = [-10000.0] * rows, [TokenType.UNUSED] * rows
    for i, piece in enumerate(read_pieces(folder / "tokenizer.model")[:rows]):
        texts[i], scores[i], types[i] = piece.text, piece.score, TokenType(piece.type)
        if piece.type == TokenType.USER_DEFINED:
            types[i] = TokenType.NORMAL
    for i, text, kind in _added_tokens(folder):
        if i < rows:
            texts[i], scores[i], types[i] = text.encode(), -1000.0, kind
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    add_special_tokens(writer, folder, n_vocab=rows)


def _added_tokens(folder: Path) -> list[tuple[int, str, TokenType]]:
    path = folder / "added_tokens.json"
    added = read_json(path) if path.is_file() else {}
    found = [(int(i), text, TokenType.USER_DEFINED) for text, i in added.items()]
    for number, token in (read_tokenizer_config(folder).get("added_tokens_decoder") or {}).items():
        text = token["content"]
        control = token.get("special") or looks_special(text)
        kind = TokenType.CONTROL if control else TokenType.USER_DEFINED
        found.append((int(number), text if control else text.replace(_SPACE, " "), kind))
    return found


_PARTS = ("a", "Z", "1", "23", " ", "\n", "'s", "'LL", ".", "/", "\u65e5", "\u093f", "\ud55c")
_PROBES = (
    "Ab's don't 1234 $5<=6 ~\u65e5\u672c\u0915\u093f\ud55c \n\n  x\t.\u2026 a'single /\r\n\r "
    "\u0e2a\u0e27\u0e31 \u00e9 \U0001f999    4     5       7         9           x",
    "".join(map("".join, product(_PARTS, repeat=3))),
)
"""Texts in which pre-tokenizers differ: contractions, digits, runs of spaces and lines, marks, scripts, cases."""


def pre_tokenizer_name(path: Path, parts: Mapping[str, Any]) -> str:
    """The name of llama.cpp's pre-tokenizer that splits a text as this tokenizer.json does.

    Raises:
        EngineError: none does, or a normalizer changes the text before it is split.
    """
    from tokenizers import Tokenizer

    from quengine.models.tokenizer.pre_tokenizers import pre_tokenizer, pre_tokenizer_names

    normalizer = (parts.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise EngineError(f"{path}: its normalizer is {normalizer}, which no GGUF file can say")
    own = Tokenizer.from_file(str(path))
    whole = bool((parts.get("model") or {}).get("ignore_merges"))
    bos = bool(own.encode("").ids)
    likely = ["llama-bpe", "qwen2", "gpt-2"]
    names = likely + [name for name in pre_tokenizer_names() if name not in likely]
    fitting = [
        name
        for name in names
        if (found := pre_tokenizer(name)).byte_level
        and found.digit_groups is None
        and found.ignore_merges == whole
    ]
    for probe in _PROBES:
        cuts = _cuts(own.pre_tokenizer, probe)
        fitting = [name for name in fitting if _cuts_by(pre_tokenizer(name).patterns, probe) == cuts]
    if not fitting:
        raise EngineError(f"{path}: no pre-tokenizer that a GGUF file can name splits text as it does")
    return next((name for name in fitting if pre_tokenizer(name).add_bos == bos), fitting[0])


@cache
def _cuts_by(patterns: tuple[str, ...], text: str) -> bytes:
    """The cuts of `text` by `patterns`. Cached: names share patterns, and all folders are compared with the same."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in patterns]
    return _cuts(pre_tokenizers.Sequence(splits), text)


def _cuts(splitter: Any, text: str) -> bytes:
    """Where a text's words begin and end."""
    return array("I", chain.from_iterable(span for _, span in splitter.pre_tokenize_str(text))).tobytes()
