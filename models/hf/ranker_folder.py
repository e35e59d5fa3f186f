"""Folders of Qwen3-Reranker, which are those of a causal language model: two rows of its output matrix are a head."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quengine.errors import EngineError
from quengine.models.architectures.qwen import RANK_TEMPLATE
from quengine.models.config import ModelConfig, Ranker
from quengine.models.hf.hf_headers import read_templates
from quengine.models.hf.json_file import read_lenient_text
from quengine.models.tokenizer import Tokenizer

_NAME = "qwen3-reranker"
_ANSWERS = ("yes", "no")


def read_ranker(folder: Path, keys: Mapping[str, Any], config: ModelConfig) -> Ranker | None:
    """The head and prompt by which a folder scores pairs; None: it is no such model. keys: its config.json's.

    As in llama.cpp's converter, such folders are recognized by name: the folder's, the one in config.json, or the title
    of README.md.

    Raises EngineError where an answer is not one token of the vocabulary, or has no row in the output matrix, and where
    the template lacks a text of the pair.
    """
    if config.architecture != "qwen3" or config.ranker is not None or not _is_named(folder, keys):
        return None
    tokenizer, found = Tokenizer.from_hf(folder), list[int]()
    for answer in _ANSWERS:
        ids = tokenizer.encode(answer)
        if len(ids) != 1:
            raise EngineError(
                f"{folder}: a reranker's answer {answer!r} is {len(ids)} tokens of its vocabulary, not 1"
            )
        if ids[0] >= config.vocab_size:
            raise EngineError(
                f"{folder}: a reranker's answer {answer!r} is token {ids[0]}, and the output matrix has "
                f"{config.vocab_size} rows"
            )
        found += ids
    ranker = Ranker(2, True, read_templates(folder).get("rerank", RANK_TEMPLATE), tuple(found))
    if ranker.missing:
        raise EngineError(f"{folder}: the chat template rerank has no {ranker.missing}")
    return ranker


def _is_named(folder: Path, keys: Mapping[str, Any]) -> bool:
    readme = folder / "README.md"
    if any(_NAME in str(name).lower() for name in (folder.name, keys.get("_name_or_path", ""))):
        return True
    return readme.is_file() and f"# {_NAME}" in read_lenient_text(readme).lower()
