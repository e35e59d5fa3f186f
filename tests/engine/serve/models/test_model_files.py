"""Which models a folder and a file of presets have, and with which options."""

import os
import socket
from pathlib import Path

import pytest

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.models.hub.presets import write_preset
from quengine.serve.models.model_spec import check_names, find_models, weight_bytes
from quengine.serve.models.preset_file import find_specs
from quengine.serve.settings import ModelsOptions, ServerSettings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "small-Q4_K_M.gguf",
        "mmproj-F16.gguf",
        ".hidden/x.gguf",
        "vision/vision-Q8_0.gguf",
        "vision/mmproj-vision-F16.gguf",
        "big/big-00001-of-00002.gguf",
        "big/big-00002-of-00002.gguf",
        "one/same.gguf",
        "two/same.gguf",
        "hub/checkpoint/config.json",
        "hub/checkpoint/model.safetensors",
        "no-model/config.json",
    ):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"12345")
    return tmp_path


def settings(folder: Path | None = None, preset: Path | None = None) -> ServerSettings:
    return ServerSettings(models=ModelsOptions(folder, preset))


def test_a_folder_has_each_model_once_by_the_name_of_its_file(folder: Path) -> None:
    found = {name: path.relative_to(folder).as_posix() for name, path in find_models(folder).items()}
    assert found == {
        "small-Q4_K_M": "small-Q4_K_M.gguf",
        "vision-Q8_0": "vision/vision-Q8_0.gguf",
        "big": "big/big-00001-of-00002.gguf",
        "one/same": "one/same.gguf",
        "two/same": "two/same.gguf",
        "checkpoint": "hub/checkpoint",
    }
    assert weight_bytes(folder / "big/big-00001-of-00002.gguf") == 10
    assert weight_bytes(folder / "hub/checkpoint") == 5


def test_what_no_model_can_be_read_from_is_skipped_with_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = find_models(folder)
    os.mkfifo(folder / "pipe.gguf")
    (folder / "dangling.gguf").symlink_to(folder / "nothing")
    (folder / "loop.gguf").symlink_to(folder / "loop.gguf")
    (folder / "device.gguf").symlink_to("/dev/null")
    (folder / "secret.gguf").write_bytes(b"12345")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(folder)
        listener.bind("socket.gguf")
        access = os.access
        monkeypatch.setattr(
            os, "access", lambda path, mode: Path(path).name != "secret.gguf" and access(path, mode)
        )
        assert find_models(folder) == find_models(folder) == expected
    skipped = [record.getMessage() for record in caplog.records]
    assert len(skipped) == 6 and all(" is skipped: " in line and "\n" not in line for line in skipped)
    for line in (
        "pipe.gguf is skipped: not a regular",
        "dangling.gguf is skipped: a link that leads nowhere",
    ):
        assert any(line in each for each in skipped)
    assert len(find_specs(settings(folder), EngineConfig())) == len(expected)


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no such folder"):
        find_models(tmp_path / "nothing")
    with pytest.raises(EngineError, match="no models in"):
        find_specs(settings(tmp_path), EngineConfig())


def test_a_preset_of_engine_create_has_its_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    model = str(folder / "small-Q4_K_M.gguf")
    write_preset("pirate", {"model": model, "system": "Arr", "ctx_size": 64, "temperature": 0.5})
    file = folder / "presets.toml"
    file.write_text('[one]\nmodel = "pirate"\ntemp = 1.5\n')
    (spec,) = find_specs(settings(preset=file), EngineConfig())
    assert str(spec.path) == model and spec.config.ctx_size == 64
    assert spec.settings.chat.system == "Arr" and spec.settings.defaults.temperature == 1.5


def test_presets_give_options_names_and_models(folder: Path) -> None:
    preset = folder / "presets.toml"
    preset.write_text(
        """
        [defaults]
        ctx-size = 512
        temperature = 0.5
        [small-Q4_K_M]
        alias = ["small", "s"]
        temp = 0
        parallel = 2
        sleep-idle-seconds = 9
        lora = ["style.gguf:0.5", "/other.gguf"]
        [other]
        model = "one/same.gguf"
        load-on-startup = true
        chat_template_kwargs = { enable_thinking = false }
        """
    )
    specs = {spec.name: spec for spec in find_specs(settings(folder, preset), EngineConfig(threads=1))}
    small, other = specs["small-Q4_K_M"], specs["other"]
    assert small.settings.model_names == ("small-Q4_K_M", "small", "s") and small.nbytes == 5
    assert (small.settings.defaults.temperature, small.settings.parallel, small.settings.sleep_s) == (0, 2, 9)
    assert (small.config.ctx_size, small.config.parallel, small.config.threads) == (512, 2, 1)
    assert small.config.lora == (f"{folder}/style.gguf:0.5", "/other.gguf") and not other.config.lora
    assert not small.at_start and other.at_start and other.path == folder / "one/same.gguf"
    assert other.settings.defaults.temperature == 0.5 == specs["big"].settings.defaults.temperature
    assert other.settings.chat.variables == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[x]\ntemp = 1", r"\[x\]: it names no model"),
        ("temp = 1", "temp: must be in a table"),
        ("[x", "it is no TOML"),
        ('[one]\nmodel = "one/same.gguf"\ntmp = 1', "no option 'tmp'; did you mean temp"),
        ('[one]\nmodel = "one/same.gguf"\ntemp = "hot"', "must be a number"),
        ('[one]\nmodel = "one/same.gguf"\ntemp = -1', r"\[one\]: .*temperature"),
        ('[one]\nmodel = "one/same.gguf"\nport = 1', "port: that is an option of the whole server"),
        ('[one]\nmodel = "nowhere.gguf"', r"\[one\]: nowhere.gguf: no such file"),
    ],
)
def test_what_is_wrong_in_presets_is_one_line_with_its_place(folder: Path, text: str, message: str) -> None:
    preset = folder / "presets.toml"
    preset.write_text(text)
    with pytest.raises(EngineError, match=message):
        check_names(find_specs(settings(None, preset), EngineConfig()))


def test_two_models_of_one_name_are_refused(folder: Path) -> None:
    preset = folder / "presets.toml"
    preset.write_text('[small-Q4_K_M]\nalias = "big"')
    with pytest.raises(EngineError, match="two models are called big"):
        check_names(find_specs(settings(folder, preset), EngineConfig()))
