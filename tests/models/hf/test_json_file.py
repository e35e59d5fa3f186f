"""JSON of a Hugging Face folder is read whole or refused in a line, in little time and memory."""

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.json_file import MAX_JSON_BYTES, MAX_TEXT_BYTES, read_json, read_lenient_text

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"rms_norm_eps": NaN}', "NaN is no JSON number"),
        ('{"rope_theta": -Infinity}', "-Infinity is no JSON number"),
        ('{"rope_theta": 1e999}', "1e999 is too large for a number"),
        ('{"vocab_size": 1' + "0" * 3000 + "}", "a number of 3001 digits"),
        ('{"vocab_size": 1' + "0" * 9000 + "}", "a number of 9001 digits"),
        ('{"name": "\\ud800"}', "half of a surrogate pair"),
        ('{"\\udc00": 1}', "half of a surrogate pair"),
        ('{"name": "\\\\ud800 \\ud83d\\ude42 \\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "recursion"),
        ("[]", "must hold a JSON object"),
        ("{", "line 1 column 2"),
        ("\ufeff{}", "BOM"),
    ],
)
def test_what_is_no_plain_json_object_is_refused(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(EngineError, match=problem) as raised:
        read_json(path)
    assert str(raised.value).startswith(f"{path}: ") and len(str(raised.value)) < 300 + len(str(path))


def test_large_integers_and_whole_surrogate_pairs_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(
        '{"model_max_length": 1000000000000000019884624838656, "a": "\\ud83d\\ude42 \\\\ud800"}'
    )
    assert read_json(tmp_path / "a") == {"model_max_length": int(1e30), "a": "🙂 \\ud800"}


def test_brackets_do_not_fill_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b'{"a": [' + b"[]," * (MAX_JSON_BYTES // 3 - 9) + b"0]}")
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match="too many values"):
            read_json(tmp_path / "a")
        assert tracemalloc.get_traced_memory()[1] < 2 * MAX_JSON_BYTES
    finally:
        tracemalloc.stop()


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name in ("large", "long"):
        with (tmp_path / name).open("wb") as file:
            file.truncate((MAX_JSON_BYTES if name == "large" else MAX_TEXT_BYTES) + 1)
    for name, problem in (
        ("pipe", "not a regular file"),
        ("zeros", "not a regular file"),
        ("loop", "symbolic links"),
        ("folder", "directory|not a regular file"),
        ("large", f"over the limit of {MAX_JSON_BYTES}"),
        ("none", "no such file"),
    ):
        with pytest.raises(EngineError, match=problem):
            read_json(tmp_path / name)
    with pytest.raises(EngineError, match=f"over the limit of {MAX_TEXT_BYTES}"):
        read_lenient_text(tmp_path / "long")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            (key, value)
            for key in ("rope_theta", "rms_norm_eps", "partial_rotary_factor")
            for value in (1e308, 10**99)
        ),
        *(("rope_scaling", {"type": kind, "factor": 1e308}) for kind in ("linear", "yarn")),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1e308}),
        ("rope_scaling", {"rope_type": "yarn", "factor": 1e308, "mscale": 1e308, "mscale_all_dim": 1e308}),
        ("rope_parameters", {**LLAMA3, "rope_theta": -10000.0}),
        ("rope_parameters", {**LLAMA3, "original_max_position_embeddings": -1e20}),
        ("num_attention_heads", 0),
        ("head_dim", -4),
        ("max_window_layers", -1e15),
        ("layer_types", [["full_attention"], {}]),
    ],
)
def test_numbers_and_types_that_no_model_has_are_errors_of_the_configuration(key: str, value: object) -> None:
    config = {"model_type": "qwen3", "vocab_size": 300, "max_position_embeddings": 64, "hidden_size": 8}
    config |= {
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "use_sliding_window": True,
    }
    config |= {"sliding_window": 8, key: value}  # type: ignore[dict-item]
    try:
        rope = read_hf_config(json.loads(json.dumps(config))).rotation(0).spec()
    except EngineError as error:
        assert str(error).startswith("config.json: ")
    else:
        # A huge base or factor is no more than that.
        assert rope.base < float("inf") and rope.factor < float("inf")
