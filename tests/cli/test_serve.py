"""`engine serve` as a program: its flags' errors, and a life from start to SIGTERM."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import httpx
import pytest

from quengine.cli.commands.serve import served_name
from quengine.cli.main import run
from quengine.errors import EngineError
from quengine.options import Flag
from quengine.serve.settings import ServerSettings
from tests.engine.serve.ports import url_of
from tests.gguf_builder import ModelSizes
from tests.quick_python import QuickPopen
from tests.tiny_models import write_tiny


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--api-key"),
        (["--api-key-file", "nothing"], "cannot read the keys from nothing"),
        (["--parallel", "0"], "--parallel 0"),
        (["--max-n", "0"], "--max-n 0: must be"),
        (["--max-connections", "0"], "--max-connections 0: must be"),
        (["--header-timeout", "0"], "--header-timeout 0.0: must be"),
        (["--idle-timeout", "nan"], "--idle-timeout nan: must be"),
        (["--temp", "-1"], "--temp -1.0: must be"),
        (["--pooling", "max"], "--pooling 'max': must be mean or cls or last or none"),
        ([], "no-such-model.gguf"),
    ],
)
def test_a_wrong_flag_is_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "-m", "no-such-model.gguf", "--port", "0", *flags]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_keys_are_read_a_line_each(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\none\n\n two \n")
    assert ServerSettings(api_key_file=file).api_keys == ("one", "two")
    file.write_text("# none\n")
    with pytest.raises(EngineError, match="holds no key"):
        ServerSettings(api_key_file=file)


def test_keys_that_others_can_read_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    for mode, warnings in ((0o600, 0), (0o644, 1), (0o644, 1)):
        file.chmod(mode)
        assert replace(ServerSettings(api_key_file=file)).api_keys == ("one",)
        assert len(caplog.records) == warnings
    assert "other users can read the keys (mode 644): chmod 600 it" in caplog.text


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("qwen2.5-0.5b-q4k", "qwen2.5-0.5b-q4k"),
        ("hf:a/b:Q4_K_M", "hf:a/b:Q4_K_M"),
        ("/x/model.Q4.gguf", "model.Q4"),
        ("folder/checkpoint/", "checkpoint"),
    ],
)
def test_a_model_is_called_what_its_user_calls_it(model: str, name: str) -> None:
    assert served_name(model) == name


@pytest.mark.parametrize("flags", [[], ["-v"]], ids=["quiet", "-v"])
def test_a_server_answers_logs_and_exits_with_0_at_sigterm(tmp_path: Path, flags: list[str]) -> None:
    sizes = ModelSizes(embedding=64, feed_forward=128, context=128)
    model = write_tiny(tmp_path / "tiny.gguf", kind="Q8_0", sizes=sizes)
    command = [sys.executable, "-m", "quengine.cli.main", *flags, "serve", "-m", str(model), "--port", "0"]
    process = QuickPopen(
        [*command, "--device", "cpu"], stderr=subprocess.PIPE, text=True, env=os.environ | {"NO_COLOR": "1"}
    )
    try:
        url, _ = url_of(process)
        body = {"prompt": "the", "n_predict": 3, "ignore_eos": True}
        answer = httpx.post(f"{url}/completion", json=body, timeout=120)
        assert answer.json()["model"] == "tiny"
        assert httpx.get(f"{url}/health", timeout=120).status_code == 200
        process.send_signal(signal.SIGTERM)
        log = process.communicate(timeout=120)[1]
        assert process.returncode == 0
        tokens = r"prompt \d+ tokens \(0 cached\), completion 3 tokens"
        assert re.search(rf'127\.0\.0\.1:\d+ "POST /completion" 200 \d+\.\d+ s, {tokens}\n', log), log
        for more in ("connection from 127.0.0.1", '"GET /health" 200'):
            assert (more in log) == bool(flags), log
    finally:
        process.kill()
        process.communicate()


def test_aliases_may_be_given_with_commas_or_repeatedly() -> None:
    (names,) = (
        note for note in get_args(ServerSettings.__annotations__["model_names"]) if isinstance(note, Flag)
    )
    assert names.read is not None and names.read(["a, b", "c", "a,"]) == ("a", "b", "c")
