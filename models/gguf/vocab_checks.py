"""Checks what a GGUF file's tokenizer arrays say of each other, before a tokenizer or a model trusts them.

It checks types, lengths, ranges and names; how text becomes tokens is `quengine.models.tokenizer`'s business.
"""

import logging
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quengine.models.gguf.cursor import StringArray
from quengine.models.gguf.errors import shown
from quengine.models.gguf.file import GGUFFile

log = logging.getLogger(__name__)

MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
SCORES = "tokenizer.ggml.scores"
TOKEN_TYPE = "tokenizer.ggml.token_type"
MERGES = "tokenizer.ggml.merges"
CHAT_TEMPLATE = "tokenizer.chat_template"
MAX_TEMPLATE_BYTES = 1 << 20
MAX_VOCABULARY = 1 << 24
# Token types 1 to 6: normal, unknown, control, user-defined, unused, byte.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
# Special tokens that a tokenizer or a template reads; files may name others (separators, masks, infilling).
SPECIAL_ID_KEYS = tuple(
    f"tokenizer.ggml.{name}_token_id"
    for name in (
        *("bos", "eos", "eot", "eom", "unknown", "padding"),
        *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep"),
    )
)
# Kind of tokenizer (MODEL) -> the array that says what merges first. Converters write the other one too.
MERGED_BY = {"llama": SCORES, "gpt2": MERGES, "t5": SCORES}
_BYTE_TOKEN = re.compile(rb"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class CheckedVocabulary:
    """What was decoded to be checked: the tokens' texts, and the halves of each merge."""

    texts: list[str]
    merges: list[tuple[str, str]]


def check_vocabulary(file: GGUFFile) -> CheckedVocabulary:
    """Raises GGUFError unless the tokenizer arrays of `file` are whole and agree with each other.

    Checked: types and lengths of tokens, token types, and of scores or merges, whichever the kind of tokenizer uses;
    every token and merge is UTF-8; no score is NaN; special-token ids are in range; byte tokens name a byte, each at
    most once; each merge is a pair whose halves and result are tokens. What is not used is not checked.
    """
    tokens = file.require_strings(TOKENS)
    if not 0 < len(tokens) <= MAX_VOCABULARY:
        raise file.error(TOKENS, f"{len(tokens)} tokens, must be 1 to {MAX_VOCABULARY}")
    texts = list(tokens)
    unused = _unused_array(file)
    if unused != SCORES:
        _check_scores(file, len(texts))
    types = _check_types(file, len(texts))
    for key in SPECIAL_ID_KEYS:
        token_id = file.get_int(key, 0, (1 << 32) - 1)
        if token_id is not None and token_id >= len(texts) and not _means_none(token_id):
            raise file.error(key, f"{token_id} is not a token, the vocabulary has {len(texts)}")
    if types is not None:
        _check_byte_tokens(file, tokens, types)
    merges = None if unused == MERGES else file.get_strings(MERGES)
    pairs = [] if merges is None else _checked_merges(file, merges, frozenset(texts))
    return CheckedVocabulary(texts, pairs)


def check_chat_templates(file: GGUFFile) -> None:
    """Raises GGUFError for a chat template (`tokenizer.chat_template` or a named one) over 1 MiB."""
    for key in file.metadata:
        if key == CHAT_TEMPLATE or key.startswith(CHAT_TEMPLATE + "."):
            size = len((file.get_str(key) or "").encode())
            if size > MAX_TEMPLATE_BYTES:
                raise file.error(
                    key, f"{size} bytes of chat template, at most {MAX_TEMPLATE_BYTES} are allowed"
                )


def _means_none(token_id: int) -> bool:
    """Whether an id stands for no token: converters write -1, as u32, for a special token that the model lacks."""
    return token_id == (1 << 32) - 1


def _unused_array(file: GGUFFile) -> str | None:
    """The key of scores or merges, whichever this kind of tokenizer does not use; None for an unknown kind."""
    kind = file.metadata.get(MODEL)
    used = MERGED_BY.get(kind) if isinstance(kind, str) else None
    if used is None:
        return None
    unused = SCORES if used == MERGES else MERGES
    if unused in file.metadata:
        log.info("%s: %s is not used: tokenizer model %r goes by %s", file.path, unused, kind, used)
    return unused


def _check_scores(file: GGUFFile, count: int) -> None:
    scores = file.get_floats(SCORES)
    if scores is None:
        return
    if len(scores) != count:
        raise file.error(SCORES, f"{len(scores)} scores for {count} tokens")
    bad = np.flatnonzero(~np.isfinite(scores.astype(np.float64)))
    if bad.size:
        raise file.error(SCORES, f"{scores[bad[0]]} is not a finite score", int(bad[0]))


def _check_types(file: GGUFFile, count: int) -> NDArray[np.generic] | None:
    types = file.get_ints(TOKEN_TYPE)
    if types is None:
        return None
    if len(types) != count:
        raise file.error(TOKEN_TYPE, f"{len(types)} token types for {count} tokens")
    values = types.astype(np.int64)
    bad = np.flatnonzero((values < 0) | (values > BYTE))
    if bad.size:
        raise file.error(TOKEN_TYPE, f"{types[bad[0]]} is not a token type (0 to {BYTE})", int(bad[0]))
    return types


def _check_byte_tokens(file: GGUFFile, tokens: StringArray, types: NDArray[np.generic]) -> None:
    seen: dict[bytes, int] = {}
    for index in np.flatnonzero(types == BYTE).tolist():
        raw = tokens.raw(index)
        if not _BYTE_TOKEN.fullmatch(raw):
            raise file.error(
                TOKENS, f"{shown(raw)} is typed as a byte, whose name is <0x00> to <0xFF>", index
            )
        if raw in seen:
            raise file.error(TOKENS, f"byte token {shown(raw)} is token {seen[raw]} too", index)
        seen[raw] = index


def _checked_merges(file: GGUFFile, merges: StringArray, tokens: frozenset[str]) -> list[tuple[str, str]]:
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    joined = {left + right for left, right in pairs}
    halves = {left for left, _ in pairs} | {right for _, right in pairs}
    if "" not in halves and halves <= tokens and joined <= tokens:
        return pairs
    pairs = []
    for index, merge in enumerate(merges):
        # The first character may itself be a space, so the separator is looked for after it.
        split = merge.find(" ", 1)
        left, right = merge[:split], merge[split + 1 :]
        if split < 0 or not right:
            raise file.error(MERGES, f"{shown(merge)} is not two tokens with a space between", index)
        if left not in tokens or right not in tokens or left + right not in tokens:
            missing = next(part for part in (left, right, left + right) if part not in tokens)
            raise file.error(MERGES, f"{shown(merge)}: {shown(missing)} is no token of the vocabulary", index)
        pairs.append((left, right))
    return pairs
