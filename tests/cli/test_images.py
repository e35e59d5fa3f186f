"""`--image` and `/image`: an image in a prompt, from the command line."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quengine.cli.main import run
from tests.engine.fake_vision import seeing, write_model

COMMON = ["--device", "cpu", "--temp", "0", "-n", "4", "--ignore-eos"]
PICTURE = bytes(range(40, 90))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_model(tmp_path_factory.mktemp("images") / "m.gguf")
    with seeing(path):  # every model that is loaded reads images
        yield path


@pytest.fixture
def picture(tmp_path: Path) -> str:
    (tmp_path / "picture.png").write_bytes(PICTURE)
    return str(tmp_path / "picture.png")


@pytest.mark.parametrize(
    "prompt", [["--chat", "the cat"], ["--raw", "the cat"], ["--raw", "the <image> cat <image>"]]
)
def test_generate_reads_images(
    model: Path, picture: str, prompt: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where a raw prompt has no marker they stand in front."""
    for images in ([], ["--image", picture], ["--image", picture, "--image", picture]):
        if images and len(images) // 2 < prompt[1].count("<image>"):
            continue
        assert run(["generate", "-m", str(model), *prompt, *images, *COMMON, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert printed["prompt_tokens"] // len(PICTURE) == len(images) // 2


def test_an_image_that_is_not_there_is_one_line(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-m", str(model), "a", "--image", "missing.png", *COMMON]) == 1
    assert "cannot read the image missing.png" in capsys.readouterr().err
    assert run(["generate", "-m", str(model), "a", "--image", "/dev/zero", *COMMON]) == 1
    assert "cannot read the image /dev/zero: it is a device" in capsys.readouterr().err
    assert run(["generate", "-m", str(model), "a", "--image", "m", "--no-mmproj", *COMMON]) == 1
    assert "no projector" in capsys.readouterr().err


def test_chat_sends_an_image_with_the_next_message(
    model: Path, picture: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path(picture).with_name("kept.json")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"/image {picture}\nlook\n/save {kept}\n"))
    assert run(["chat", "-m", str(model), *COMMON]) == 0
    assert "picture.png is sent with the next message" in capsys.readouterr().err
    content = json.loads(kept.read_text())["messages"][0]["content"]
    assert content == [{"type": "image", "image": picture}, {"type": "text", "text": "look"}]
