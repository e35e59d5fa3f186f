"""Vocabularies for synthetic models: Mistral's own where its package is installed, else generated ones.

Each is the tokenizer metadata of a GGUF file, as keys and values. Generated ones are whole: every merge and
byte token names a token, so text goes in and out.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice, product
from string import ascii_lowercase

import numpy as np

from quengine.models.gguf.vocab_checks import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from quengine.models.tokenizer.bpe import BYTE_TO_CHAR

MetadataValue = str | int | bool | float | list[str] | list[int] | list[float] | list[bool]
Metadata = dict[str, MetadataValue]

MISTRAL_V3 = "mistral_instruct_tokenizer_240323.model.v3"


@dataclass(frozen=True)
class SpmPieces:
    """A SentencePiece vocabulary: the piece, score and token type of each id."""

    pieces: list[str]
    scores: list[float]
    types: list[int]


def spm_metadata(vocab_size: int) -> Metadata:
    """A SentencePiece-style vocabulary of `vocab_size` tokens, at least 300; for 32768, Mistral v3's own."""
    vocabulary = mistral_v3_pieces() if vocab_size == 32768 else None
    if vocabulary is None:
        vocabulary = _generated_pieces(vocab_size)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": vocabulary.pieces,
        "tokenizer.ggml.scores": vocabulary.scores,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


def mistral_v3_pieces() -> SpmPieces | None:
    """Mistral's v3 vocabulary from the mistral-common package, or None where that is not installed."""
    try:
        from sentencepiece import SentencePieceProcessor

        model = files("mistral_common") / "data" / MISTRAL_V3
    except ModuleNotFoundError:
        return None
    if not model.is_file():
        return None
    processor = SentencePieceProcessor(model_proto=model.read_bytes())
    count = processor.vocab_size()
    pieces = [processor.id_to_piece(i) for i in range(count)]
    types = []
    for i in range(count):
        if processor.is_unknown(i):
            types.append(UNKNOWN)
        elif processor.is_control(i):
            types.append(CONTROL)
        elif processor.is_byte(i):
            types.append(BYTE)
        elif processor.is_unused(i):
            types.append(UNUSED)
        else:
            # What stands before the byte tokens and is none of those was added by hand.
            types.append(NORMAL if BYTE in types else USER_DEFINED)
    return SpmPieces(pieces, [processor.get_score(i) for i in range(count)], types)


def _words() -> Iterator[str]:
    """Letter strings, shortest first: a, b, ..., aa, ab, ..."""
    for length in range(1, 6):
        for letters in product(ascii_lowercase, repeat=length):
            yield "".join(letters)


def _generated_pieces(vocab_size: int) -> SpmPieces:
    if vocab_size < 300:
        raise ValueError(f"a generated vocabulary needs at least 300 tokens, not {vocab_size}")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    room = vocab_size - len(special)
    normal = ["\u2581", *islice(_words(), 26), *(f"\u2581{word}" for word in islice(_words(), room))]
    normal += islice(_words(), 26, room)
    normal = list(dict.fromkeys(normal))[:room]
    # SentencePiece merges the pair with the highest score first: scores fall with the id.
    scores = [0.0] * len(special) + [-float(i) for i in range(room)]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * room
    return SpmPieces(special + normal, scores, types)


def bpe_metadata(vocab_size: int, pre: str) -> Metadata:
    """A byte-level BPE vocabulary of `vocab_size` tokens, at least 300, for pre-tokenizer `pre`."""
    if vocab_size < 300:
        raise ValueError(f"a generated vocabulary needs at least 300 tokens, not {vocab_size}")
    tokens = [*BYTE_TO_CHAR, "<|endoftext|>"]
    room = vocab_size - len(tokens)
    merges: list[str] = []
    # "\u0120" is byte-level BPE's space; w = w[:-1] + w[-1], both of which are tokens by then.
    for word in _words():
        for prefix in ("", "\u0120"):
            whole = prefix + word
            if len(whole) > 1 and len(merges) < room:
                merges.append(f"{whole[:-1]} {whole[-1]}")
        if len(merges) == room:
            break
    tokens += [merge.replace(" ", "") for merge in merges]
    types = np.full(len(tokens), NORMAL)
    types[256] = CONTROL
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types.tolist(),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 256,
        "tokenizer.ggml.add_bos_token": False,
    }
