"""Projectors beside models: found, refused by name, or passed over with a note."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quengine.config import EngineConfig
from quengine.errors import EngineError
from quengine.loading.load_vision import open_vision, projector_path
from quengine.models import vision as package
from tests.engine.fake_vision import FakeImage

MODEL: Any = SimpleNamespace(encoder=None, embedding_length=32, rope_axes=())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "mmproj-m-f16.gguf").write_bytes(b"")
    return tmp_path / "m.gguf"


def opened(model: Path, monkeypatch: pytest.MonkeyPatch, image: FakeImage, **given: Any) -> Any:
    settings = SimpleNamespace(text_size=32, projector="odd")
    processor = SimpleNamespace(settings=settings, prepare=lambda _: image)
    made = SimpleNamespace(projector="odd")
    monkeypatch.setattr(package, "load_processor", lambda _: processor)
    monkeypatch.setattr(package, "load_vision", lambda *_, **__: made)
    return open_vision(EngineConfig(**given), model, MODEL, torch.device("cpu"))


def test_a_projector_beside_the_model_is_found(model: Path, tmp_path: Path) -> None:
    assert projector_path(EngineConfig(), model) == tmp_path / "mmproj-m-f16.gguf"
    assert projector_path(EngineConfig(no_mmproj=True), model) is None
    assert projector_path(EngineConfig(mmproj="other.gguf"), model) == Path("other.gguf")
    assert projector_path(EngineConfig(), tmp_path / "none" / "m.gguf") is None
    with pytest.raises(EngineError, match="give one of them"):
        EngineConfig(mmproj="other.gguf", no_mmproj=True)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (FakeImage((1,), b"", bidirectional=True), "both ways are not implemented"),
        (FakeImage((1,), b"", grid=(1, 1, 1)), "three axes, and m.gguf does not say which"),
    ],
)
def test_a_projector_that_is_not_computed_is_named(
    model: Path, monkeypatch: pytest.MonkeyPatch, image: FakeImage, message: str
) -> None:
    """An error where it was asked for; where it was found, the model reads text and says so."""
    vision, (note,) = opened(model, monkeypatch, image)
    assert vision is None and note.startswith("images are not read: projector odd")
    with pytest.raises(EngineError, match=message):
        opened(model, monkeypatch, image, mmproj="mmproj.gguf")


def test_a_projector_that_is_computed_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vision, (note,) = opened(model, monkeypatch, FakeImage((1,), b""))
    assert vision.projector == "odd" and "projector odd of mmproj-m-f16.gguf" in note
