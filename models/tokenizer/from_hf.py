"""Reads the tokenizer of a Hugging Face checkpoint folder: tokenizer.json and tokenizer_config.json.

The `tokenizers` library runs tokenizer.json as it is written; this module finds out what its tokens stand for
and which have a role. Does not read tokenizer.model or tekken.json, which lack what tokenizer.json says.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as Engine

from quengine.models.gguf.vocab_checks import MAX_VOCABULARY
from quengine.models.hf_headers import read_json
from quengine.models.tokenizer.byte_level import byte_level_bytes
from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.scored_bpe import SPACE, scored_bytes
from quengine.models.tokenizer.token_length import of_pipeline
from quengine.models.tokenizer.tokenizer import Tokenizer
from quengine.models.tokenizer.vocabulary import TokenType, Vocabulary, control_texts, with_roles_by_text


class WholeTextEncoder:
    """tokenizer.json as an encoder. Whether control tokens are matched is a switch on the library's object."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = Lock()

    def encode(self, text: str, special: bool) -> list[int]:
        with self._lock:
            self._engine.encode_special_tokens = not special
            ids: list[int] = self._engine.encode(text, add_special_tokens=False).ids
        return ids


def tokenizer_from_hf(folder: Path) -> Tokenizer:
    """Raises EngineError for a file that is missing or no JSON, TokenizerError for one that does not work."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json; convert its tokenizer with transformers first")
    parts = read_json(path)
    engine = _engine(path, parts)
    engine.no_truncation()
    engine.no_padding()
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    texts, types = _tokens(engine, parts, _rows(folder))
    ids = {text: i for i, text in enumerate(texts)}
    named = {
        role: ids[text] for role in ("bos", "eos", "unk", "pad") if (text := _role_text(config, role)) in ids
    }
    byte_level = _find(parts.get("decoder"), "ByteLevel") is not None
    vocabulary = Vocabulary(
        texts=texts,
        types=types,
        named_ids=named,
        add_bos=_adds_bos(engine, config, named.get("bos")),
        add_eos=bool(config.get("add_eos_token")),
        to_bytes=byte_level_bytes if byte_level else scored_bytes,
        eos_ids=_generation_ends(folder, len(texts)),
        lstrip_ids=frozenset(i for i, token in engine.get_added_tokens_decoder().items() if token.lstrip),
        rstrip_ids=frozenset(i for i, token in engine.get_added_tokens_decoder().items() if token.rstrip),
    )
    prefix = not byte_level and _puts_space_first(parts)
    complete = with_roles_by_text(vocabulary)
    return Tokenizer(complete, lambda: WholeTextEncoder(engine), prefix, lambda: of_pipeline(complete, parts))


def _engine(path: Path, parts: Mapping[str, Any]) -> Engine:
    """The library's tokenizer, with marks that end a turn made special where the file forgot to."""
    added = [token for token in parts.get("added_tokens", ()) if isinstance(token, dict)]
    marks = control_texts([token.get("content", "") for token in added], ())
    forgotten = [token for token in added if token.get("content") in marks and not token.get("special")]
    for token in forgotten:
        token["special"] = True
    try:
        return Engine.from_str(json.dumps(parts)) if forgotten else Engine.from_file(str(path))
    except Exception as failure:  # the library raises no narrower type
        raise TokenizerError(f"{path}: {' '.join(str(failure).split())}") from None


def _rows(folder: Path) -> int:
    """Rows of the model's embedding, which may be more than there are tokens."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if isinstance(size, int) and 0 <= size <= MAX_VOCABULARY else 0


def _tokens(engine: Engine, parts: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Text and type of every id, `rows` at least; ids that no token has are unused and empty."""
    known: dict[str, int] = engine.get_vocab(with_added_tokens=True)
    texts = [""] * max(max(known.values(), default=-1) + 1, rows)
    types = [int(TokenType.UNUSED)] * len(texts)
    fallback = bool(parts.get("model", {}).get("byte_fallback"))
    for text, token_id in known.items():
        is_byte = fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">")
        texts[token_id] = text
        types[token_id] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token_id, added in engine.get_added_tokens_decoder().items():
        texts[token_id] = added.content
        types[token_id] = TokenType.CONTROL if added.special else TokenType.USER_DEFINED
    return texts, types


def _role_text(config: Mapping[str, Any], role: str) -> str | None:
    value = config.get(f"{role}_token")
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _adds_bos(engine: Engine, config: Mapping[str, Any], bos: int | None) -> bool:
    """As the configuration says, else as the post-processor does with an empty text."""
    said = config.get("add_bos_token")
    if bos is None or isinstance(said, bool):
        return bool(said) and bos is not None
    return bool(engine.encode("").ids[:1] == [bos])


def _generation_ends(folder: Path, size: int) -> frozenset[int]:
    """`eos_token_id` of generation_config.json and config.json: one id or several."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.is_file() else None
        values = value if isinstance(value, list) else [value]
        found |= {i for i in values if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size}
    return frozenset(found)


def _puts_space_first(parts: Mapping[str, Any]) -> bool:
    """A `Prepend` of the space sign, or a `Metaspace` that is not told never to."""
    if _find(parts.get("normalizer"), "Prepend") is not None:
        return True
    metaspace = _find(parts.get("pre_tokenizer"), "Metaspace")
    if metaspace is None or metaspace.get("replacement", SPACE) != SPACE:
        return False
    scheme = metaspace.get("prepend_scheme")
    return bool(metaspace.get("add_prefix_space", True)) if scheme is None else scheme != "never"


def _find(part: Any, kind: str) -> Mapping[str, Any] | None:
    """The first component of tokenizer.json of that type, in a sequence or not."""
    if isinstance(part, dict) and part.get("type") == kind:
        return part
    inner = part if isinstance(part, list) else list(part.values()) if isinstance(part, dict) else []
    return next((found for each in inner if (found := _find(each, kind)) is not None), None)
