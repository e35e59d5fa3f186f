"""Reads a vocabulary and its way of encoding from GGUF metadata (`tokenizer.ggml.*`).

Knows the keys and their defaults (GGUF specification, "Tokenizer"; llama.cpp src/llama-vocab.cpp where the
specification is silent). Does not check what the GGUF reader checks: types of values, ids in range.
"""

from collections.abc import Callable

from quengine.models.gguf import GGUFFile
from quengine.models.tokenizer.byte_level import ByteLevelBPE, byte_level_bytes
from quengine.models.tokenizer.errors import TokenizerError
from quengine.models.tokenizer.pre_tokenizers import PreTokenizer, pre_tokenizer
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
}


def tokenizer_from_gguf(file: GGUFFile) -> Tokenizer:
    """Raises GGUFError for missing or unfit metadata, TokenizerError for kinds that are not supported."""
    kind = file.require_str(_PREFIX + "model")
    if kind == "gpt2":
        return _byte_level(file)
    raise TokenizerError(f"{file.path}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")


def _byte_level(file: GGUFFile) -> Tokenizer:
    name = file.get_str(_PREFIX + "pre") or "default"
    try:
        splits = pre_tokenizer(name)
    except TokenizerError as failure:
        raise TokenizerError(f"{file.path}: {failure}") from None
    vocabulary = _vocabulary(file, splits.add_bos, byte_level_bytes)
    return Tokenizer(vocabulary, lambda: _byte_level_encoder(file, vocabulary, splits))


def _byte_level_encoder(file: GGUFFile, vocabulary: Vocabulary, splits: PreTokenizer) -> TextEncoder:
    key = _PREFIX + "merges"
    merges = []
    for index, merge in enumerate(file.require_strings(key)):
        # The first character may itself be a space in files of odd origin.
        cut = merge.find(" ", 1)
        if cut < 0:
            raise file.error(key, f"{merge!r} is not two pieces with a space between", index)
        merges.append((merge[:cut], merge[cut + 1 :]))
    return ByteLevelBPE(vocabulary, merges, splits)


def _vocabulary(file: GGUFFile, add_bos: bool, to_bytes: Callable[[str], bytes]) -> Vocabulary:
    texts = list(file.require_strings(_PREFIX + "tokens"))
    types = file.get_ints(_PREFIX + "token_type")
    if types is not None and len(types) != len(texts):
        raise file.error(_PREFIX + "token_type", f"{len(types)} entries for {len(texts)} tokens")
    roles = {role: _token_id(file, _PREFIX + key, len(texts)) for role, key in _ROLES.items()}
    said = file.get_bool(_PREFIX + "add_bos_token")
    if said and roles["bos"] is None:
        raise file.error(_PREFIX + "add_bos_token", "true, but there is no bos_token_id")
    vocabulary = Vocabulary(
        texts=texts,
        types=[int(TokenType.NORMAL)] * len(texts) if types is None else types.tolist(),
        named_ids={role: i for role, i in roles.items() if i is not None},
        add_bos=(add_bos if said is None else said) and roles["bos"] is not None,
        add_eos=bool(file.get_bool(_PREFIX + "add_eos_token")),
        to_bytes=to_bytes,
    )
    _check_unique(file, vocabulary)
    return with_roles_by_text(vocabulary)


def _token_id(file: GGUFFile, key: str, size: int) -> int | None:
    found = file.get_int(key, high=(1 << 32) - 1)
    if found is not None and found >= size:
        raise file.error(key, f"{found} is outside of the vocabulary of {size} tokens")
    return found


def _check_unique(file: GGUFFile, vocabulary: Vocabulary) -> None:
    if len(vocabulary.ids) == len(vocabulary):
        return
    for index, text in enumerate(vocabulary.texts):
        last = vocabulary.ids[text]
        if text and last != index:
            raise file.error(_PREFIX + "tokens", f"{text!r} is both token {index} and token {last}", index)
