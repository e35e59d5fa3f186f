"""A small BPE vocabulary whose merges cross the ends of words, so that every difference in splitting shows in the ids.

Merges of real vocabularies stay within words, and few of a small one have other letters than ASCII: two tokenizers
that split differently often give the same ids there. These merges are trained on whole texts of `text_samples`.
"""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer as Engine
from tokenizers import models, pre_tokenizers, trainers

from tests.gguf_builder import GGUFBuilder, byte_level_alphabet
from tests.text_samples import HAND_PICKED, marked_texts, random_texts

SIZE = 6000
# No text of the samples spells them, so that no merge makes them.
BOS, EOS = "[[BOS]]", "[[EOS]]"


def write_crossing_vocabulary(pre: str, path: Path, byte_level: bool = True) -> Path:
    """A vocabulary-only GGUF of tokenizer kind gpt2 with that `tokenizer.ggml.pre`.

    byte_level: tokens spelled in GPT-2's byte alphabet; else in characters, with a token for every byte.
    """
    tokens, merges = _trained(byte_level)
    start, types = ["[[UNK]]", BOS, EOS], [2, 3, 3]
    if not byte_level:
        start += [f"<0x{byte:02X}>" for byte in range(256)] + ["\n\n", "\n\n\n"]
        types += [6] * 256 + [1] * 2
    values = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": start + tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    types += [1] * len(tokens)
    return GGUFBuilder().kvs(values).kv("tokenizer.ggml.token_type", types, "int32").write(path)


@cache
def _trained(byte_level: bool) -> tuple[list[str], list[str]]:
    """Tokens in order of id, and merges in order of rank."""
    texts = [*HAND_PICKED, *random_texts(2, 1500), *marked_texts(3, 3000, [])]
    engine = Engine(models.BPE())
    if byte_level:
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        alphabet = byte_level_alphabet()
    else:
        texts = [text.replace(" ", "▁").replace("\0", "") for text in texts]
        engine.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
        alphabet = []
    # Where tokens are characters, the limit leaves some without one, which become bytes.
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE, initial_alphabet=alphabet, limit_alphabet=2000, show_progress=False
    )
    engine.train_from_iterator(texts, trainer)
    model = json.loads(engine.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]
