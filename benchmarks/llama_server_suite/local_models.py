"""The models that llama-server's tests ask for by hub name, made here: small ones of random weights.

Their text is pieces of words in an order that means nothing; the vocabulary is SentencePiece's, <s> in front of a
prompt. Control and byte tokens are never likely, so that every text is UTF-8 and ends by its length.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from benchmarks.llama_server_suite.shim import PRESETS
from quengine.models.gguf.vocab_checks import BYTE, CONTROL, NORMAL, UNKNOWN
from quengine.models.synthetic.synthetic_vocabulary import mistral_v3_pieces
from tests.gguf_builder import BYTE_TOKENS, GGUFBuilder, ModelSizes
from tests.tiny_models import CHATML, random_weights

_OF_THE_ROUTER = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)
_CONTROL = ("<unk>", "<s>", "</s>", "[PREFIX]", "[SUFFIX]", "[MIDDLE]")


def write_models(folder: Path) -> None:
    """Those that are not there: `letters.gguf` of 512 tokens, as many as stories260K has, `words.gguf` of 32768, and
    `draft.gguf` of the same."""
    folder.mkdir(parents=True, exist_ok=True)
    names = "".join(f'["{name}"]\nmodel = "letters.gguf"\n' for name in _OF_THE_ROUTER)
    (folder / PRESETS).write_text(names)
    for name, pieces, seed in (("letters", 512, 0), ("words", 32768, 0), ("draft", 32768, 1)):
        path = folder / f"{name}.gguf"
        if not path.exists():
            _write(path, name, pieces, seed)


def _write(path: Path, name: str, pieces: int, seed: int) -> None:
    tokens, types, scores = _vocabulary(pieces)
    sizes = ModelSizes(embedding=64, feed_forward=128, context=8192)
    metadata = {
        **sizes.metadata(),
        "general.name": name,
        "tokenizer.chat_template": CHATML,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.fim_pre_token_id": 3,
        "tokenizer.ggml.fim_suf_token_id": 4,
        "tokenizer.ggml.fim_mid_token_id": 5,
    }
    weights = random_weights(sizes, len(tokens), tied=False, seed=seed)
    weights["output.weight"][np.array(types) != NORMAL] = 0.0
    builder = GGUFBuilder().kvs(metadata).kv("tokenizer.ggml.token_type", types, "int32")
    for tensor, values in weights.items():
        kind = "Q8_0" if values.ndim > 1 else "F32"
        builder.tensor(tensor, values.shape, kind, quantize(values, GGMLQuantizationType[kind]))
    builder.write(path)


def _vocabulary(pieces: int) -> tuple[list[str], list[int], list[float]]:
    """`pieces` tokens: control and byte tokens, all ASCII characters, and those of Mistral's that are merged first."""
    given = mistral_v3_pieces()
    assert given is not None, "mistral-common is not installed"
    ranked = [piece for piece, kind in zip(given.pieces, given.types, strict=True) if kind == NORMAL]
    single = [piece for piece in ranked if len(piece) == 1 and (piece.isascii() or piece == "\u2581")]
    merged = [piece for piece in ranked if len(piece) > 1]
    tokens = [*_CONTROL, *BYTE_TOKENS]
    tokens += [*merged[: pieces - len(tokens) - len(single)], *single]
    kinds = [UNKNOWN, *[CONTROL] * (len(_CONTROL) - 1), *[BYTE] * len(BYTE_TOKENS)]
    types = kinds + [NORMAL] * (len(tokens) - len(kinds))
    return tokens, types, [float(-index) for index in range(len(tokens))]
