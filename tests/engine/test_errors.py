"""What an error quotes from a model's file cannot command a terminal, nor make more than one line."""

import json
from pathlib import Path

import pytest

from quengine.errors import EngineError
from quengine.models.hf.config_hf import read_hf_config
from quengine.models.hf.hf_headers import read_config


def test_an_error_is_one_printable_line() -> None:
    assert str(EngineError("a\x1b]0;t\x07\nb\u2028c\ud800 é")) == "a\\x1b]0;t\\x07 b c\\ud800 é"
    assert str(EngineError()) == ""
    assert str(EngineError("x" * 10_000)) == "x" * 1500 + "..."


def test_a_quantization_method_is_named_without_its_control_characters(tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": {"quant_method": "\x1b[2J\x1b]0;owned\x07\nawq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="awq") as raised:
        read_hf_config(read_config(tmp_path))
    assert str(raised.value).isprintable()
