"""Which tokenizer.json runs in our own process: those of real families. Others have the same ids in one with limits."""

import sys
from pathlib import Path
from typing import Any

import pytest

from quengine.models.tokenizer import Tokenizer, TokenizerError, from_hf
from quengine.models.tokenizer.bounded_parts import is_bounded
from quengine.models.tokenizer.from_hf import LimitedEngine
from quengine.models.tokenizer.library_engine import LibraryEngine
from tests import quick_python
from tests.hf_mutations import (
    HOSTILE_NORMALIZERS,
    HOSTILE_PRE_TOKENIZERS,
    TEXTS,
    TOKENIZER,
    seeds,
    write_files,
)
from tests.text_samples import random_texts

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def parts(**changes: Any) -> dict[str, Any]:
    return {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, **changes}


def test_the_patterns_that_transformers_writes_are_known() -> None:
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2 import tokenization_qwen2

    for pattern in (tokenization_qwen2.PRETOKENIZE_REGEX, TikTokenConverter().pattern):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        assert is_bounded(parts(pre_tokenizer={"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"normalizer": value} for value in HOSTILE_NORMALIZERS),
        *({"pre_tokenizer": value} for value in HOSTILE_PRE_TOKENIZERS),
        {"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "bb"}},
        {"decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+"}, "content": ""}},
        {"model": {"type": "Unigram", "vocab": [["a" * 1000, 0.0]]}},
        {"model": {"type": "Unigram", "vocab": [["", 0.0]]}},
        {"model": {"type": "Unigram", "vocab": {"a": 0.0}}},
        {"model": {"type": "BPE", "vocab": [], "merges": []}},
        {"model": {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "x" * 100}},
        {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a"}}] * 1000}},
        {"added_tokens": [3]},
        {"normalizer": {"type": ["NFC"]}},
        {"pre_tokenizer": {"type": "Sequence"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": ["a"]}}},
        {"pre_tokenizer": [BYTE_LEVEL]},
    ],
)
def test_what_is_hostile_or_not_known_is_not_bounded(changes: dict[str, Any]) -> None:
    assert is_bounded(parts())
    assert not is_bounded(parts(**changes))


def test_ids_are_the_same_in_a_process_with_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [*TEXTS, *random_texts(5, 40), "lone \ud800"]
    for number, files in enumerate(seeds(tmp_path / "seeds")):
        folder = tmp_path / str(number)
        write_files(folder, files)
        found = []
        for bounded in (True, False):
            monkeypatch.setattr(from_hf, "is_bounded", lambda _, answer=bounded: answer)
            tokenizer = Tokenizer.from_hf(folder)
            ids = [tokenizer.encode(text, special=special) for text in texts for special in (False, True)]
            names = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
            found.append((ids, names, tokenizer.eos_ids, tokenizer.add_bos, tokenizer.bos_id))
        assert found[0] == found[1]


def test_a_real_familys_tokenizer_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(LimitedEngine, "__init__", fail)
    for number, files in enumerate(seeds(tmp_path / "seeds")[:3]):
        write_files(tmp_path / str(number), files)
        assert Tokenizer.from_hf(tmp_path / str(number)).encode("a")


def test_memory_and_time_of_a_process_with_limits_are_bounded(tmp_path: Path) -> None:
    files = seeds(tmp_path / "seeds")[1]
    write_files(tmp_path / "m", {TOKENIZER: {**files[TOKENIZER], "normalizer": HOSTILE_NORMALIZERS[0]}})
    tokenizer = Tokenizer.from_hf(tmp_path / "m")
    with pytest.raises(
        TokenizerError, match=r"tokenizer\.json: (takes more than 1 seconds|.*ended with SIGABRT)"
    ):
        tokenizer.encode("a" * 4000)
    assert tokenizer.encode("b")
    # In a process of its own, whose only child is the one with limits.
    script = (
        "import resource, sys; from pathlib import Path; from quengine.models.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.from_hf(Path(sys.argv[1]))\n"
        "try: tokenizer.encode('a' * 4000)\n"
        "except Exception: print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "m")]
    done = quick_python.run(command, capture_output=True, text=True, timeout=240)
    assert int(done.stdout) < 1536 << 10, done.stderr


def test_a_panic_of_the_library_is_a_value_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = seeds(tmp_path / "seeds")[1]
    write_files(tmp_path / "m", {TOKENIZER: {**files[TOKENIZER], "pre_tokenizer": HOSTILE_PRE_TOKENIZERS[0]}})
    path = str(tmp_path / "m" / TOKENIZER)
    with pytest.raises(ValueError, match="retry-limit"):
        LibraryEngine(path).encode("a" * 4000 + "!", False)
    capfd.readouterr()  # what Rust says of a panic
    with pytest.raises(ValueError, match="retry-limit"):
        LimitedEngine(path).encode("a" * 4000 + "!", False)
    assert capfd.readouterr().err == ""
