"""Reads the tokenizer of a Hugging Face checkpoint folder: tokenizer.json and tokenizer_config.json.

The `tokenizers` library runs tokenizer.json as it is written: in this process if all its parts are known to be bounded,
else in a process with limits. This module finds out what its tokens stand for and which have a role. It does not read
tokenizer.model or tekken.json, which lack information that tokenizer.json has.
"""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from quengine.models.gguf.vocab_checks import MAX_VOCABULARY
from quengine.models.hf.hf_headers import read_tokenizer_config
from quengine.models.hf.json_file import read_json
from quengine.models.template.limited_process import LimitedProcess, ProcessLimits, ProcessStoppedError
from quengine.models.tokenizer.bounded_parts import is_bounded
from quengine.models.tokenizer.bpe import byte_level_bytes
from quengine.models.tokenizer.library_engine import LibraryEngine
from quengine.models.tokenizer.parts import TokenizerParts
from quengine.models.tokenizer.scored_bpe import SPACE, scored_bytes
from quengine.models.tokenizer.token_length import of_pipeline
from quengine.models.tokenizer.vocabulary import (
    END_OF_GENERATION,
    TokenizerError,
    TokenType,
    Vocabulary,
    control_texts,
    with_roles_by_text,
)

_WORKER = Path(__file__).with_name("library_engine.py")
# The largest tokenizer in use takes 0.4 GiB.
_LIMITS = ProcessLimits(cpu_seconds=1.0, memory_bytes=1 << 30)


class TokenizerEngine(Protocol):
    """An object that runs a tokenizer.json, with the methods of `LibraryEngine`. A LimitedEngine also raises
    ProcessStoppedError."""

    def describe(self) -> dict[str, Any]: ...

    def encode(self, text: str, special: bool) -> list[int]: ...


class LimitedEngine:
    """A tokenizer.json in a process with limits."""

    def __init__(self, path: str, text: str | None = None) -> None:
        """As `LibraryEngine`, but the file is not read before the first request."""
        self._process = LimitedProcess(_WORKER, {"path": path, "json": text}, _LIMITS)

    def describe(self) -> dict[str, Any]:
        return self._ask({})

    def encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._ask({"text": text, "special": special})["ids"]
        return ids

    def _ask(self, question: Any) -> dict[str, Any]:
        answer = self._process.ask(question)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer


class WholeTextEncoder:
    """tokenizer.json as an encoder. It needs a lock: whether control tokens match is set on the library's object."""

    def __init__(self, engine: TokenizerEngine, origin: Path) -> None:
        self._engine = engine
        self._origin = origin
        self._lock = Lock()

    def encode(self, text: str, special: bool) -> list[int]:
        """The ids of `text`. Raises TokenizerError: the file's parts fail at it, or need too much time or memory."""
        with self._lock:
            try:
                return self._engine.encode(text, special)
            except (ValueError, ProcessStoppedError) as failure:
                raise TokenizerError(f"{self._origin}: {failure}") from None


@dataclass(frozen=True)
class Described:
    """`LibraryEngine.describe`, checked."""

    vocab: Mapping[str, int]
    added: Sequence[tuple[int, str, bool]]
    empty: Sequence[int]
    pair: Sequence[int]


def engine_for(path: Path, parts: Mapping[str, Any]) -> TokenizerEngine:
    """The engine for the tokenizer.json `parts`. Marks known control tokens as special where the file does not.

    Raises TokenizerError: the library refuses the file.
    """
    given = parts.get("added_tokens")
    if given is not None and not isinstance(given, list):
        raise TokenizerError(f"{path}: added_tokens is no array")
    added = [token for token in given or () if isinstance(token, dict)]
    contents = [token["content"] for token in added if isinstance(token.get("content"), str)]
    marks = control_texts(set(contents), ())
    unmarked = [
        t
        for t in added
        if isinstance(t.get("content"), str) and t["content"] in marks and not t.get("special")
    ]
    for token in unmarked:
        token["special"] = True
    text = json.dumps(parts) if unmarked else None
    kind = LibraryEngine if is_bounded(parts) else LimitedEngine
    try:
        return kind(str(path.absolute()), text)
    except ValueError as failure:
        raise TokenizerError(f"{path}: {failure}") from None


def describe(path: Path, engine: TokenizerEngine) -> Described:
    """The description that `engine` gives of its tokens. Raises TokenizerError: the engine fails, or an id is too
    large."""
    try:
        found = engine.describe()
    except (ValueError, ProcessStoppedError) as failure:
        raise TokenizerError(f"{path}: {failure}") from None
    added = [(int(i), str(text), bool(special)) for i, text, special in found["added"]]
    largest = max((*found["vocab"].values(), *(i for i, _, _ in added)), default=-1)
    if largest >= MAX_VOCABULARY:
        raise TokenizerError(f"{path}: token {largest} is not from 0 to {MAX_VOCABULARY - 1}")
    return Described(found["vocab"], added, found["empty"], found["pair"])


_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


def read_hf_tokenizer(folder: Path) -> TokenizerParts:
    """A folder's tokenizer. Raises EngineError for a file that is no JSON, TokenizerError for a tokenizer.json that is
    missing or does not work."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(f"{folder} has no tokenizer.json; convert its tokenizer with transformers first")
    parts = read_json(path)
    engine = engine_for(path, parts)
    described = describe(path, engine)
    config = read_tokenizer_config(folder)
    texts, types = _tokens(described, parts, _rows(folder))
    ids = {text: i for i, text in enumerate(texts)}
    named = {
        role: ids[text] for role in ("bos", "eos", "unk", "pad") if (text := _role_text(config, role)) in ids
    }
    ends = _generation_ends(folder, len(texts))
    if "eos" not in named and (text := _role_text(config, "sep")) in ids:
        named["eos"] = ids[text]  # of encoders, whose texts end with a separator
    first = _first_of_all(described, texts, ends | {named.get("eos", -1)})
    if "bos" not in named and first is not None:
        named["bos"] = first
    byte_level = _find(parts.get("decoder"), "ByteLevel") is not None
    vocabulary = Vocabulary(
        texts=texts,
        types=types,
        named_ids=named,
        add_bos=_adds_bos(described, config, named.get("bos")),
        add_eos=_adds_eos(described, config, named.get("eos")),
        to_bytes=byte_level_bytes if byte_level else scored_bytes,
        eos_ids=ends,
        suppressed_ids=_suppressed(folder, len(texts)),
        lstrip_ids=_stripping(parts, "lstrip"),
        rstrip_ids=_stripping(parts, "rstrip"),
        pair_gap=_pair_gap(described),
    )
    prefix = not byte_level and _puts_space_first(parts)
    complete = with_roles_by_text(vocabulary)
    return TokenizerParts(
        complete, lambda: WholeTextEncoder(engine, path), lambda: of_pipeline(complete, parts), prefix
    )


def _stripping(parts: Mapping[str, Any], side: str) -> frozenset[int]:
    """Ids of the added tokens that absorb the white space on `side`, "lstrip" or "rstrip"."""
    added = [token for token in parts.get("added_tokens") or () if isinstance(token, dict)]
    return frozenset(
        token["id"] for token in added if token.get(side) is True and type(token.get("id")) is int
    )


def _rows(folder: Path) -> int:
    """The number of rows of the model's embedding, possibly more than tokens; 0 if config.json does not say."""
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else {}
    inner = config.get("text_config")
    size = (inner if isinstance(inner, dict) else config).get("vocab_size")
    return size if isinstance(size, int) and 0 <= size <= MAX_VOCABULARY else 0


def _tokens(described: Described, parts: Mapping[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """Text and type of every id, at least `rows` of them; ids without a token are UNUSED, with empty text."""
    known = described.vocab
    largest = max((*known.values(), *(i for i, _, _ in described.added)), default=-1)
    texts = [""] * max(largest + 1, rows)
    types = [int(TokenType.UNUSED)] * len(texts)
    model = parts.get("model")
    fallback = isinstance(model, dict) and bool(model.get("byte_fallback"))
    for text, token_id in known.items():
        is_byte = fallback and _BYTE.fullmatch(text) is not None
        texts[token_id] = text
        types[token_id] = TokenType.BYTE if is_byte else TokenType.NORMAL
    for token_id, text, special in described.added:
        texts[token_id] = text
        types[token_id] = TokenType.CONTROL if special else TokenType.USER_DEFINED
    return texts, types


def _role_text(config: Mapping[str, Any], role: str) -> str | None:
    value = config.get(f"{role}_token")
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None


def _first_of_all(described: Described, texts: Sequence[str], ends: Set[int]) -> int | None:
    """The token that the post-processor puts in front of a text, for folders that do not name it; None: none."""
    first = next(iter(described.empty), None)
    return None if first is None or first in ends or texts[first] in END_OF_GENERATION else first


def _adds_bos(described: Described, config: Mapping[str, Any], bos: int | None) -> bool:
    """Whether BOS begins a text, by the configuration or else by what the post-processor does with an empty text."""
    said = config.get("add_bos_token")
    if bos is None or isinstance(said, bool):
        return bool(said) and bos is not None
    return list(described.empty[:1]) == [bos]


def _adds_eos(described: Described, config: Mapping[str, Any], eos: int | None) -> bool:
    """Whether the end token follows a text."""
    said = config.get("add_eos_token")
    if eos is None or isinstance(said, bool):
        return bool(said)
    return list(described.empty[-1:]) == [eos]


def _pair_gap(described: Described) -> tuple[int, ...]:
    """Ids that the post-processor puts between the end token of a pair's first text and the second text."""
    one, both = list(described.empty), list(described.pair)
    return tuple(both[len(one) : -1]) if len(one) > 1 and both[: len(one)] == one else ()


def _generation_ends(folder: Path, size: int) -> frozenset[int]:
    """`eos_token_id` of generation_config.json and config.json: one id or several."""
    names = ("generation_config.json", "config.json")
    return frozenset().union(*(_ids(folder / name, "eos_token_id", size) for name in names))


def _suppressed(folder: Path, size: int) -> frozenset[int]:
    return _ids(folder / "generation_config.json", "suppress_tokens", size)


def _ids(path: Path, key: str, size: int) -> frozenset[int]:
    """The token ids that a JSON file has at `key`: none, one or several."""
    value = read_json(path).get(key) if path.is_file() else None
    values = value if isinstance(value, list) else [value]
    return frozenset(i for i in values if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size)


def _puts_space_first(parts: Mapping[str, Any]) -> bool:
    """Whether a `Prepend`, or a `Metaspace` whose scheme is not "never", puts a space before a text."""
    if _find(parts.get("normalizer"), "Prepend") is not None:
        return True
    metaspace = _find(parts.get("pre_tokenizer"), "Metaspace")
    if metaspace is None or metaspace.get("replacement", SPACE) != SPACE:
        return False
    scheme = metaspace.get("prepend_scheme")
    return bool(metaspace.get("add_prefix_space", True)) if scheme is None else scheme != "never"


def _find(part: Any, kind: str) -> Mapping[str, Any] | None:
    """The first component of this type in tokenizer.json, within a sequence or alone."""
    if isinstance(part, dict) and part.get("type") == kind:
        return part
    inner = part if isinstance(part, list) else list(part.values()) if isinstance(part, dict) else []
    return next((found for each in inner if (found := _find(each, kind)) is not None), None)
