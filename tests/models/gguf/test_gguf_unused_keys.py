"""Keys that the kind of tokenizer or the architecture does not use refuse no file, whatever they hold.

llama.cpp, which reads only what it uses too, loads each of these files.
"""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quengine.models.config import ModelConfig
from quengine.models.gguf import GGUFError, open_gguf
from quengine.models.gguf.config_gguf import read_gguf_config
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.gguf.vocab_checks import check_vocabulary
from tests.gguf_builder import GGUFBuilder, ModelSizes, spm_vocabulary
from tests.llama_cpp_vocab import LlamaCppVocab
from tests.tiny_models import chat_vocabulary

BPE, SPM = chat_vocabulary(), spm_vocabulary()
COUNT = len(BPE["tokenizer.ggml.tokens"])
P, A = "tokenizer.ggml.", "llama."


def write(path: Path, vocabulary: dict[str, Any], key: str, value: Any, kind: str | None = None) -> Path:
    """A model with one key more, or another value of it."""
    sizes = ModelSizes()
    builder = GGUFBuilder()
    for name, held in (sizes.metadata() | vocabulary).items():
        if name != key:
            builder.kv(name, held, "int32" if name == P + "token_type" else None)  # the type llama.cpp takes
    builder.kv(key, value, kind)
    for name, shape in sizes.tensor_shapes(len(vocabulary[P + "tokens"]), tied=False).items():
        builder.tensor(name, shape, "F32", np.ones(shape, np.float32))
    return builder.write(path / "m.gguf")


@pytest.mark.parametrize(
    ("vocabulary", "key", "value", "kind"),
    [
        (BPE, P + "scores", [0] * COUNT, "int32"),
        (BPE, P + "scores", [float("nan")] * COUNT, "float32"),
        (SPM, P + "merges", ["no pair", "of this vocabulary", ""], "string"),
        (BPE, P + "seperator_token_id", COUNT + 7, "uint32"),
        (BPE, P + "mask_token_id", COUNT + 7, "uint32"),
        (BPE, "general.description", b"caf\xe9", "string"),
        (BPE, "general.license", [b"caf\xe9"], "string"),
        (BPE, A + "rope.scaling.original_context_length", 0, "uint32"),
        (BPE, A + "rope.scaling.yarn_beta_fast", 32, "uint32"),
        (BPE, A + "rope.scaling.yarn_ext_factor", 0.0, "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_key_that_is_not_used_refuses_no_file(
    tmp_path: Path, vocabulary: dict[str, Any], key: str, value: Any, kind: str
) -> None:
    path = write(tmp_path, vocabulary, key, value, kind)
    checkpoint = GGUFCheckpoint(path)
    with LlamaCppVocab(path) as peer:
        assert checkpoint.tokenizer().encode("the cat", bos=False) == peer.encode("the cat", bos=False)


def test_an_array_that_is_not_used_is_named_to_who_asks_for_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, BPE, P + "scores", [0] * COUNT, "int32")
    with caplog.at_level(logging.INFO, "quengine"), open_gguf(path) as file:
        check_vocabulary(file)
    (record,) = [r for r in caplog.records if "scores" in r.getMessage()]
    assert record.levelno == logging.INFO


def test_a_name_is_only_shown_and_may_be_anything(tmp_path: Path) -> None:
    assert GGUFCheckpoint(write(tmp_path, BPE, "general.name", 7, "uint32")).config.name == "llama"


@pytest.mark.parametrize(
    ("vocabulary", "key", "value", "kind", "says"),
    [
        (SPM, P + "scores", [0] * len(SPM[P + "tokens"]), "int32", "must be an array of floats"),
        (BPE, P + "merges", ["no pair"], "string", "no token of the vocabulary"),
        (BPE, P + "pre", b"caf\xe9", "string", "not valid UTF-8"),
        (BPE, "general.architecture", b"llam\xe9", "string", "not valid UTF-8"),
    ],
)
def test_what_is_used_is_checked(
    tmp_path: Path, vocabulary: dict[str, Any], key: str, value: Any, kind: str, says: str
) -> None:
    path = write(tmp_path, vocabulary, key, value, kind)
    with pytest.raises(GGUFError, match=says):
        GGUFCheckpoint(path).tokenizer()


def test_yarn_reads_its_own_keys(tmp_path: Path) -> None:
    """The values that are passed over above are refused where they count."""
    for key, value, kind in (
        ("original_context_length", 0, "uint32"),
        ("yarn_beta_fast", 32, "uint32"),
        ("yarn_ext_factor", 0.0, "float32"),
    ):
        yarn = BPE | {A + "rope.scaling.type": "yarn", A + "rope.scaling.factor": 4.0}
        with pytest.raises(GGUFError, match=key):
            GGUFCheckpoint(write(tmp_path, yarn, A + "rope.scaling." + key, value, kind))


@pytest.mark.parametrize(
    ("suffix", "size"),
    [
        ("rope.dimension_count_swa", 16),
        ("attention.key_length_swa", 16),
        ("attention.value_length_swa", 16),
    ],
)
def test_other_heads_in_layers_with_a_window_are_refused_by_name(
    tmp_path: Path, suffix: str, size: int
) -> None:
    sizes = ModelSizes("gemma3")
    metadata = {**sizes.metadata(), **SPM, "gemma3.attention.sliding_window": 4}

    def config(**changes: Any) -> ModelConfig:
        builder = GGUFBuilder().kvs(metadata | changes)
        with open_gguf(builder.write(tmp_path / "m.gguf")) as file:
            return read_gguf_config(file)

    key = f"gemma3.{suffix}"
    assert config(**{key: size}) == config()
    with pytest.raises(GGUFError, match=f"{key}.*8: heads of layers with a window have 16 elements here"):
        config(**{key: 8})
