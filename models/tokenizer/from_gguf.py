"""Reads a vocabulary and its way of encoding from GGUF metadata (`tokenizer.ggml.*`).

Knows the keys and their defaults (GGUF specification, "Tokenizer"; llama.cpp src/llama-vocab.cpp where the
specification is silent). What the arrays say of each other is checked by `gguf.vocab_checks`.
"""

import warnings
from collections.abc import Callable, Mapping

from quengine.models.gguf import GGUFFile
from quengine.models.gguf.vocab_checks import MERGES, SCORES, TOKEN_TYPE, TOKENS, check_vocabulary
from quengine.models.tokenizer.added_tokens import AddedTokenEncoder
from quengine.models.tokenizer.byte_level import ByteLevelBPE, byte_level_bytes
from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.pre_tokenizers import pre_tokenizer
from quengine.models.tokenizer.scored_bpe import ScoredBPE, scored_bytes
from quengine.models.tokenizer.token_length import of_byte_level, of_scored
from quengine.models.tokenizer.tokenizer import TextEncoder, Tokenizer
from quengine.models.tokenizer.vocabulary import TokenType, Vocabulary, with_roles_by_text

_PREFIX = "tokenizer.ggml."
_ROLES = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "fim_pad": "fim_pad_token_id",
    "fim_rep": "fim_rep_token_id",
    "fim_sep": "fim_sep_token_id",
}
# SentencePiece's own places for them, in files that do not say.
_SCORED_ROLES = {"unk": 0, "bos": 1, "eos": 2}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Raises GGUFError for missing or unfit metadata, TokenizerError for kinds that are not supported."""
    kind = file.require_str(_PREFIX + "model")
    if kind == "gpt2":
        return _byte_level(file)
    if kind == "llama":
        return _scored(file)
    raise TokenizerError(f"{file.path}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")


def _byte_level(file: GGUFFile) -> Tokenizer:
    name = file.get_str(_PREFIX + "pre")
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
    vocabulary, merges = (
        _vocabulary(file, checked.texts, splits.add_bos, {}, byte_level_bytes),
        checked.merges,
    )
    file.require_strings(MERGES)  # where it has none, `merges` is empty
    return Tokenizer(
        vocabulary,
        lambda: AddedTokenEncoder(vocabulary, ByteLevelBPE(vocabulary, merges, splits)),
        length=lambda: of_byte_level(vocabulary),
    )


def _scored(file: GGUFFile) -> Tokenizer:
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

    return Tokenizer(vocabulary, make_encoder, space_prefix, lambda: of_scored(vocabulary))


def _vocabulary(
    file: GGUFFile,
    texts: list[str],
    add_bos: bool,
    roles: Mapping[str, int],
    to_bytes: Callable[[str], bytes],
) -> Vocabulary:
    """`add_bos` and `roles` are what holds where the file does not say."""
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
    )
    _check_unique(file, vocabulary)
    return with_roles_by_text(vocabulary)


def _check_unique(file: GGUFFile, vocabulary: Vocabulary) -> None:
    if len(vocabulary.ids) == len(vocabulary):
        return
    for index, text in enumerate(vocabulary.texts):
        last = vocabulary.ids[text]
        if text and last != index:
            raise file.error(TOKENS, f"{text!r} is both token {index} and token {last}", index)
