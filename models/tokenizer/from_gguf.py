"""Reads a vocabulary and its way of encoding from GGUF metadata (`tokenizer.ggml.*`).

Keys and their defaults are those of the GGUF specification ("Tokenizer"), and of llama.cpp (src/llama-vocab.cpp) where
the specification is silent. What the arrays say of each other is checked by `gguf.vocab_checks`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace

from quengine.models.gguf import GGUFFile
from quengine.models.gguf.vocab_checks import MERGES, SCORES, TOKEN_TYPE, TOKENS, check_vocabulary
from quengine.models.tokenizer.bpe import ByteLevelBPE, CharacterBPE, byte_level_bytes
from quengine.models.tokenizer.charsmap import charsmap_problem
from quengine.models.tokenizer.parts import AddedTokenEncoder, TextEncoder, TokenizerParts
from quengine.models.tokenizer.pre_tokenizers import pre_tokenizer
from quengine.models.tokenizer.scored_bpe import ScoredBPE, scored_bytes
from quengine.models.tokenizer.token_length import of_gguf
from quengine.models.tokenizer.unigram import Unigram
from quengine.models.tokenizer.vocabulary import TokenizerError, TokenType, Vocabulary, with_roles_by_text
from quengine.models.tokenizer.wordpiece import WordPiece, word_bytes

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "fim_pre": "fim_pre_token_id",
    "fim_suf": "fim_suf_token_id",
    "fim_mid": "fim_mid_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
# SentencePiece's own ids for the roles, for files that do not give them.
_SCORED_ROLES = {"unk": 0, "bos": 1, "eos": 2}
# T5's own ids, likewise.
_UNIGRAM_ROLES = {"pad": 0, "eos": 1, "unk": 2}
_CHARSMAP = _PREFIX + "precompiled_charsmap"
# BERT's own places, likewise.
_WORD_PIECE_ROLES = {"pad": 0, "unk": 100, "bos": 101, "eos": 102}
_MASKS_STRIPPED = ("jina-v2-de", "jina-v2-es", "jina-v2-code")


# Kinds of llama.cpp that are not supported, by the names that people call them.
_OTHER_KINDS = {
    "rwkv": "RWKV",
    "plamo2": "PLaMo-2",
    "hybriddna": "DNA k-mers",
    "whitespace": "words between white space",
    "none": "no vocabulary",
    "no_vocab": "no vocabulary",
}


def read_gguf_tokenizer(file: GGUFFile) -> TokenizerParts:
    """The tokenizer of a file. Raises GGUFError for missing or unfit metadata, TokenizerError for unsupported kinds."""
    kind = file.require_str(_PREFIX + "model")
    if kind in ("gpt2", "gemma4"):
        return _merging(file, kind)
    if kind == "llama":
        return _scored(file)
    if kind == "bert":
        return _word_pieces(file)
    if kind == "t5":
        return _unigram(file)
    named = f" ({_OTHER_KINDS[kind]})" if kind in _OTHER_KINDS else ""
    raise TokenizerError(
        f"{file.path}: tokenizer model {kind!r}{named} is not supported; supported: gpt2, llama, gemma4, bert, t5"
    )


def _merging(file: GGUFFile, kind: str) -> TokenizerParts:
    name = kind if kind == "gemma4" else file.get_str(_PREFIX + "pre")
    if name is None:
        name = "default"
        warnings.warn(
            f"{file.path}: no {_PREFIX}pre; text is split the default way, perhaps not the model's",
            stacklevel=2,
        )
    try:
        splits = pre_tokenizer(name)
    except TokenizerError as failure:
        raise TokenizerError(f"{file.path}: {failure}") from None
    checked = check_vocabulary(file)
    merges = checked.merges
    file.require_strings(MERGES)  # refuses a file without the key
    to_bytes = byte_level_bytes if splits.byte_level else scored_bytes
    vocabulary = _vocabulary(file, checked.texts, splits.add_bos, {}, to_bytes)
    if splits.always_bos:
        vocabulary = replace(vocabulary, add_bos="bos" in vocabulary.named_ids)
    vocabulary = replace(vocabulary, pair_gap=_pair_gap(file, vocabulary, False))
    kind_of_bpe = ByteLevelBPE if splits.byte_level else CharacterBPE
    return TokenizerParts(
        vocabulary,
        lambda: AddedTokenEncoder(vocabulary, kind_of_bpe(vocabulary, merges, splits)),
        length=lambda: of_gguf(vocabulary, splits.byte_level),
    )


def _scored(file: GGUFFile) -> TokenizerParts:
    checked = check_vocabulary(file)
    vocabulary = _vocabulary(file, checked.texts, True, _SCORED_ROLES, scored_bytes)
    said = file.get_bool(_PREFIX + "add_space_prefix")
    space_prefix = said is None or said
    scores = file.get_floats(SCORES)
    if scores is None:
        raise file.error(SCORES, "missing, and tokenizer model 'llama' merges by score")
    values: list[float] = scores.tolist()

    def make_encoder() -> TextEncoder:
        return AddedTokenEncoder(vocabulary, ScoredBPE(vocabulary, values, space_prefix))

    return TokenizerParts(
        vocabulary, make_encoder, lambda: of_gguf(vocabulary, byte_level=False), space_prefix
    )


def _unigram(file: GGUFFile) -> TokenizerParts:
    checked = check_vocabulary(file)
    vocabulary = _vocabulary(file, checked.texts, False, _UNIGRAM_ROLES, scored_bytes)
    ends = file.get_bool(_PREFIX + "add_eos_token")
    vocabulary = replace(vocabulary, add_eos=ends is not False and "eos" in vocabulary.named_ids)
    vocabulary = replace(vocabulary, pair_gap=_pair_gap(file, vocabulary, True))
    scores, unknown = file.get_floats(SCORES), vocabulary.named_ids.get("unk")
    if scores is None:
        raise file.error(SCORES, "missing, and tokenizer model 't5' chooses by score")
    if unknown is None:
        raise file.error(_PREFIX + "unknown_token_id", "missing: characters that no tokens spell need it")
    values: list[float] = scores.tolist()
    charsmap = _charsmap(file)
    merges, prefix = (
        said is None or said
        for said in (
            file.get_bool(_PREFIX + name) for name in ("remove_extra_whitespaces", "add_space_prefix")
        )
    )

    def make_encoder() -> TextEncoder:
        pieces = Unigram(vocabulary, values, unknown, charsmap, merges, prefix)
        return AddedTokenEncoder(vocabulary, pieces)

    return TokenizerParts(vocabulary, make_encoder, lambda: None, prefix)


def _pair_gap(file: GGUFFile, vocabulary: Vocabulary, by_default: bool) -> tuple[int, ...]:
    """The separator token that follows the end token in a pair, if the file asks for both. `by_default`: whether a file
    without the key asks for it."""
    said = file.get_bool(_PREFIX + "add_sep_token")
    separator = file.get_int(_PREFIX + "seperator_token_id", high=(1 << 32) - 1)
    if separator is None or separator >= len(vocabulary) or not vocabulary.add_eos:
        return ()
    return (separator,) if (by_default if said is None else said) else ()


def _charsmap(file: GGUFFile) -> bytes:
    """The map of normalizations; b"": none. Raises GGUFError: it is not bytes, or `charsmap_problem` rejects it."""
    given = file.get_ints(_CHARSMAP)
    if given is None or not len(given):
        return b""
    raw = bytes(given.astype("uint8"))
    if given.dtype.itemsize != 1 or (problem := charsmap_problem(raw)) is not None:
        raise file.error(_CHARSMAP, "is not an array of bytes" if given.dtype.itemsize != 1 else str(problem))
    return raw


def _word_pieces(file: GGUFFile) -> TokenizerParts:
    """A WordPiece tokenizer. A text stands between two special tokens, whose own keys give BOS and EOS here."""
    checked = check_vocabulary(file)
    begin = file.get_int(_PREFIX + "cls_token_id", high=(1 << 32) - 1)
    end = file.get_int(_PREFIX + "seperator_token_id", high=(1 << 32) - 1)
    roles = {**_WORD_PIECE_ROLES}
    roles |= {role: given for role, given in (("bos", begin), ("eos", end)) if given is not None}
    vocabulary = _vocabulary(file, checked.texts, True, roles, word_bytes)
    said = [file.get_bool(f"{_PREFIX}add_{name}_token") for name in ("eos", "sep")]
    ends = next((value for value in said if value is not None), True)
    vocabulary = replace(vocabulary, add_eos=ends and "eos" in vocabulary.named_ids)
    unknown = vocabulary.named_ids.get("unk")
    if unknown is None:
        raise file.error(_PREFIX + "unknown_token_id", "missing: words that no tokens spell need it")
    lowers = file.get_bool(_PREFIX + "normalizer.lowercase")
    strips = file.get_bool(_PREFIX + "normalizer.strip_accents")
    lowers = lowers is None or lowers
    strips = lowers if strips is None else strips
    text = vocabulary.texts[unknown]

    def make_encoder() -> TextEncoder:
        return AddedTokenEncoder(vocabulary, WordPiece(vocabulary, text, lowers, strips))

    return TokenizerParts(vocabulary, make_encoder, lambda: None, space_prefix=True)


def _vocabulary(
    file: GGUFFile,
    texts: list[str],
    add_bos: bool,
    roles: Mapping[str, int],
    to_bytes: Callable[[str], bytes],
) -> Vocabulary:
    """The vocabulary of `file`. `add_bos`, `roles`: defaults for keys that the file lacks."""
    types = file.get_ints(TOKEN_TYPE)
    named = {role: i for role, i in roles.items() if i < len(texts)}
    for role, key in _ROLES.items():
        found = file.get_int(_PREFIX + key, high=(1 << 32) - 1)
        if found is not None and found < len(texts):
            named[role] = found
        elif found is not None:
            named.pop(role, None)  # converters write -1 for a token that the model does not have
    said = file.get_bool(_PREFIX + "add_bos_token")
    if said and "bos" not in named:
        raise file.error(_PREFIX + "add_bos_token", "true, but the file names no BOS token (bos_token_id)")
    vocabulary = Vocabulary(
        texts=texts,
        types=[int(TokenType.NORMAL)] * len(texts) if types is None else types.tolist(),
        named_ids=named,
        add_bos=(add_bos if said is None else said) and "bos" in named,
        add_eos=bool(file.get_bool(_PREFIX + "add_eos_token")),
        to_bytes=to_bytes,
        suppressed_ids=_suppressed(file, len(texts)),
    )
    _check_unique(file, vocabulary)
    return _with_strips(file, with_roles_by_text(vocabulary))


def _suppressed(file: GGUFFile, size: int) -> frozenset[int]:
    found = file.get_ints(_PREFIX + "suppress_tokens")
    return frozenset() if found is None else frozenset(i for i in found.tolist() if 0 <= i < size)


def _with_strips(file: GGUFFile, vocabulary: Vocabulary) -> Vocabulary:
    """`vocabulary` with the ids of tokens that absorb the white space beside them.

    GGUF has no key for this attribute of added tokens; llama.cpp recognizes the models that need it by their names.
    """
    name = (file.get_str("general.name") or "").lower()
    if any(part in (file.get_str(_PREFIX + "pre") or "") for part in _MASKS_STRIPPED):
        return replace(vocabulary, lstrip_ids=frozenset(_present(vocabulary, "<mask>")))
    if "phi-3" in name or "phi3" in name:
        added = {*vocabulary.control_tokens.values(), *vocabulary.user_defined_tokens.values()}
        added |= _present(vocabulary, "</s>")
        added -= _present(vocabulary, "<unk>", "<s>", "<|endoftext|>")
        return replace(vocabulary, rstrip_ids=frozenset(added))
    if "modern-bert" in name:
        return replace(vocabulary, lstrip_ids=frozenset(_present(vocabulary, "[MASK]")))
    return vocabulary


def _present(vocabulary: Vocabulary, *texts: str) -> set[int]:
    return {vocabulary.ids[text] for text in texts if text in vocabulary.ids}


def _check_unique(file: GGUFFile, vocabulary: Vocabulary) -> None:
    if len(vocabulary.ids) == len(vocabulary):
        return
    for index, text in enumerate(vocabulary.texts):
        last = vocabulary.ids[text]
        if text and last != index:
            raise file.error(TOKENS, f"{text!r} is both token {index} and token {last}", index)
