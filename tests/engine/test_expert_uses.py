"""Counts of uses that are kept between starts: of the model that they are of, and nothing that is wrong."""

import logging
import os
from pathlib import Path

import pytest

from quengine.loading import expert_uses
from quengine.loading.expert_uses import read_uses, uses_file, write_uses

USES = [[3, 0, 5], [1, 1, 2]]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    return path


def test_they_come_back(model: Path) -> None:
    assert read_uses(model, 2, 3) is None
    write_uses(model, USES)
    assert read_uses(model, 2, 3) == USES


def test_a_model_that_has_changed_has_none(model: Path) -> None:
    write_uses(model, USES)
    model.write_bytes(b"GGUF again")
    assert read_uses(model, 2, 3) is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "[[1, 2], [3, 4]]", "[[1, -2, 3], [4, 5, 6]]", "{", "[1, 2]", "\xff", "[" * 100_000],
    ids=range(8),
)
def test_damaged_ones_are_passed_over_with_a_line(
    model: Path, text: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quengine"), "propagate", True)
    write_uses(model, USES)
    file = uses_file(model)
    assert file is not None
    file.write_text(text, encoding="latin-1")
    assert read_uses(model, 2, 3) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and str(file) in record.getMessage()
    assert "\n" not in record.getMessage()


def test_those_of_other_layers_in_host_memory_are_passed_over(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_uses(model, USES[:1])
    assert read_uses(model, 2, 3) is None and not caplog.records


def test_those_of_the_models_used_last_are_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_uses, "MOST_FILES", 2)
    others = [tmp_path / f"{number}.gguf" for number in range(3)]
    for age, path in enumerate(others):
        path.write_bytes(bytes(age + 1))
        write_uses(path, USES)
        file = uses_file(path)
        assert file is not None
        os.utime(file, (1000 + age, 1000 + age))
    write_uses(model, USES)
    assert [read_uses(path, 2, 3) is not None for path in (*others, model)] == [False, False, True, True]


def test_a_folder_that_cannot_be_written_is_no_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model))
    write_uses(model, USES)
    assert read_uses(model, 2, 3) is None


def test_counts_that_cannot_be_written_whole_leave_those_before_and_no_part(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_uses(model, USES)
    file = uses_file(model)
    assert file is not None

    def full(_partial: Path, _path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    write_uses(model, [[9, 9, 9], [9, 9, 9]])
    assert read_uses(model, 2, 3) == USES
    assert list(file.parent.iterdir()) == [file]
