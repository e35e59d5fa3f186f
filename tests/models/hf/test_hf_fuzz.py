"""Damaged Hugging Face folders end in an EngineError or are read whole: no other exception, hang or large allocation.

A bounded number of cases; `python -m benchmarks.checks.fuzz_hf` runs as many as asked for.
"""

import logging
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quengine.errors import EngineError
from quengine.models.tokenizer import Tokenizer, TokenizerError
from tests.hf_mutations import (
    HOSTILE_NORMALIZERS,
    HOSTILE_PRE_TOKENIZERS,
    TEXTS,
    TOKENIZER,
    Mutator,
    read_everything,
    write_files,
)

MEMORY_KIB = 1536 << 10


@pytest.fixture(scope="module")
def mutator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mutator]:
    logging.getLogger("quengine").setLevel(logging.ERROR)
    yield Mutator(tmp_path_factory.mktemp("seeds"))
    logging.getLogger("quengine").setLevel(logging.NOTSET)


def peak() -> int:
    return max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def test_the_undamaged_folders_are_read_whole(tmp_path: Path, mutator: Mutator) -> None:
    for number, files in enumerate(mutator.seeds):
        write_files(tmp_path / str(number), files)
        assert read_everything(tmp_path / str(number)) == "ok"


def test_structure_aware_damage(tmp_path: Path, mutator: Mutator) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: dict[str, int] = {}
    folder = tmp_path / "case"
    for number in range(20):
        mutator.write(number, folder)
        outcome = read_everything(folder)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        shutil.rmtree(folder)
    # A mutation that is never noticed, or never gets past the first file, tests nothing.
    assert outcomes["ok"] >= 4 and len(outcomes) >= 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY_KIB


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *(("normalizer", value) for value in HOSTILE_NORMALIZERS[3:4]),
        *(("pre_tokenizer", value) for value in HOSTILE_PRE_TOKENIZERS[:5:2]),
    ],
)
def test_a_hostile_tokenizer_is_an_error_or_encodes_within_bounds(
    tmp_path: Path, mutator: Mutator, part: str, value: Any
) -> None:
    write_files(tmp_path, {**mutator.seeds[1], TOKENIZER: {**mutator.seeds[1][TOKENIZER], part: value}})
    began = time.monotonic()
    try:
        tokenizer = Tokenizer.from_hf(tmp_path)
        tokenizer.encode(TEXTS[1] + "!")
    except TokenizerError as error:
        assert str(error).startswith(f"{tmp_path / TOKENIZER}: ")
    assert time.monotonic() - began < 60
    assert peak() < 4 * MEMORY_KIB


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"added_tokens": None}, "invalid type: null"),
        ({"added_tokens": {}}, "added_tokens is no array"),
        ({"added_tokens": [{"id": 1, "content": ["<s>"]}]}, "expected a string"),
        ({"added_tokens": [None, 3]}, "invalid type"),
        ({"model": None}, r"tokenizer\.json: "),
        (
            {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
            "token 4294967295 is not from 0 to",
        ),
    ],
)
def test_values_of_another_type_or_size_are_errors_of_the_file(
    tmp_path: Path, mutator: Mutator, change: dict[str, Any], problem: str
) -> None:
    write_files(tmp_path, {TOKENIZER: {**mutator.seeds[1][TOKENIZER], **change}})
    with pytest.raises(EngineError, match=problem) as raised:
        Tokenizer.from_hf(tmp_path)
    assert str(raised.value).startswith(f"{tmp_path / TOKENIZER}: ")


def test_added_tokens_may_be_left_out(tmp_path: Path, mutator: Mutator) -> None:
    left_out = ("added_tokens", "post_processor")
    write_files(
        tmp_path, {TOKENIZER: {k: v for k, v in mutator.seeds[1][TOKENIZER].items() if k not in left_out}}
    )
    assert len(Tokenizer.from_hf(tmp_path).encode("the")) == 2
