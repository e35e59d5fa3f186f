"""The files of `engine bench --synthetic`: where they go, what makes room, what is refused, what is removed."""

import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from math import prod
from pathlib import Path

import pytest

from quengine.config import EngineConfig
from quengine.diagnostics.bench import synthetic_files
from quengine.diagnostics.bench.bench_plan import BenchPlan
from quengine.diagnostics.bench.synthetic_files import synthetic_models
from quengine.errors import CannotRunError, EngineError
from quengine.memory import gib
from quengine.models.synthetic.presets import PRESETS, synthetic_preset
from quengine.models.synthetic.synthetic import synthetic_bytes
from quengine.models.tensor_table import tensor_specs
from tests.quick_python import QuickPopen

PLAN = BenchPlan(config=EngineConfig(device="cpu"))
TINY = synthetic_bytes("tiny")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quengine" / "synthetic"


@pytest.fixture
def lines() -> list[str]:
    return []


def disk(monkeypatch: pytest.MonkeyPatch, folder: Path, size: int) -> None:
    """`folder` is on a disk of so many bytes, which its files fill; other folders are on a large one."""
    usage = namedtuple("usage", "total used free")

    def disk_usage(path: Path) -> usage:
        if not Path(path).is_relative_to(folder):
            return usage(1 << 50, 0, 1 << 50)
        used = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
        return usage(size, used, size - used)

    monkeypatch.setattr("shutil.disk_usage", disk_usage)


def test_a_file_is_kept_and_used_again(cache: Path, lines: list[str]) -> None:
    shown: list[str] = []
    with synthetic_models(["tiny"], PLAN, None, lines.append, shown.append) as (path,):
        written = path.read_bytes()
    assert path.parent == cache and path.read_bytes() == written
    assert f"writing {path}, {gib(TINY)} of" in lines[0] and "--synthetic-dir" in lines[0]
    assert shown[-2].endswith("100%") and shown[-1] == ""
    with synthetic_models(["tiny"], PLAN, None, lines.append, shown.append) as again:
        assert again == [path]
    assert lines[1].startswith(f"{path} is used, ") and len(lines) == 2


def test_another_folder_keeps_files_where_it_is_said(tmp_path: Path, cache: Path, lines: list[str]) -> None:
    with synthetic_models(["tiny"], PLAN, tmp_path / "mine", lines.append, str) as (path,):
        assert path.parent == tmp_path / "mine"
    assert path.is_file() and not cache.exists()


def test_the_oldest_make_room_and_those_in_use_stay(
    cache: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(parents=True)
    for age, name in enumerate(("newest", "middle", "oldest")):
        (cache / f"{name}.gguf").write_bytes(bytes(TINY))
        os.utime(cache / f"{name}.gguf", (1e9 - age, 1e9 - age))
    disk(monkeypatch, cache, 5 * TINY // 2 + TINY + synthetic_files._SPARE)
    with synthetic_models(["tiny"], PLAN, None, lines.append, str) as (path,):
        assert path.is_file()
    assert sorted(each.name for each in cache.iterdir()) == ["middle.gguf", "newest.gguf", path.name]
    assert "oldest.gguf makes room" in lines[0]


def test_a_folder_of_the_users_own_loses_no_file_to_make_room(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "other.gguf").write_bytes(bytes(TINY))
    disk(monkeypatch, tmp_path / "mine", TINY + 1000)
    with (
        pytest.raises(CannotRunError, match=rf"takes {gib(TINY)}, and 0.0 MiB are free in .*mine"),
        synthetic_models(["tiny"], PLAN, tmp_path / "mine", lines.append, str),
    ):
        pass
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["other.gguf"] and not lines


@pytest.mark.parametrize("why", ["no home", "a full disk", "no rights"])
def test_where_nothing_can_be_kept_a_temporary_folder_is_removed_at_the_end(
    why: str, tmp_path: Path, cache: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "no home":
        monkeypatch.setattr(synthetic_files, "user_cache", lambda: None)
    elif why == "a full disk":
        cache.mkdir(parents=True)
        disk(monkeypatch, cache, 1000)
    else:
        (tmp_path / "cache").write_text("a file in the folder's place")
    with (
        pytest.raises(ZeroDivisionError),
        synthetic_models(["tiny"], PLAN, None, lines.append, str) as (path,),
    ):
        assert path.is_file() and not path.is_relative_to(tmp_path / "cache")
        raise ZeroDivisionError
    assert not path.parent.exists()
    (line,) = lines
    assert "removed at the end" in line and ("home folder" if why == "no home" else str(cache)) in line


def test_more_than_the_memory_is_refused_before_anything_is_written(
    cache: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_files, "free_memory", lambda *_: 24 << 30)
    with (
        pytest.raises(CannotRunError) as refused,
        synthetic_models(["tiny", "llama-3-70b"], PLAN, None, lines.append, str),
    ):
        pass
    said = str(refused.value)
    assert "llama-3-70b: its weights take 39." in said and "23.75 GiB free" in said
    fewer = next(word for word in said.split() if word.startswith("llama-3-70b-"))
    layers = int(fewer.removeprefix("llama-3-70b-").removesuffix("l"))
    assert synthetic_bytes(fewer) <= 23.75 * 2**30 < synthetic_bytes(f"llama-3-70b-{layers + 1}l")
    assert not cache.exists() and not lines


def test_what_does_not_fit_with_one_layer_names_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_files, "free_memory", lambda *_: 300 << 20)
    with (
        pytest.raises(CannotRunError, match=r"free; .*-tiny fits|free; tiny fits"),
        synthetic_models(["mistral-7b-2l"], PLAN, None, print, str),
    ):
        pass


def test_an_unknown_preset_is_an_error_that_lists_them() -> None:
    with (
        pytest.raises(EngineError, match=r"llama-9b.*mistral-7b.*tiny"),
        synthetic_models(["llama-9b"], PLAN, None, print, str),
    ):
        pass


def test_the_first_layers_of_a_preset_are_one() -> None:
    fewer = synthetic_preset("llama-3-70b-20l")
    assert fewer is not None and fewer.block_count == 20 and fewer.name == "synthetic llama-3-70b-20l"
    assert synthetic_preset("mistral-7b-2l") == PRESETS["mistral-7b-2l"]
    for name in ("llama-3-70b-80l", "llama-3-70b-0l", "llama-3-70b-l", "nothing-2l", "llama-3-70b-2"):
        assert synthetic_preset(name) is None


@pytest.mark.parametrize(
    ("preset", "weights"), [("gemma-4-12b", 11_907_350_576), ("nemotron-nano-9b-v2", 8_888_227_328)]
)
def test_a_preset_has_the_weights_of_the_released_model(preset: str, weights: int) -> None:
    specs = tensor_specs(PRESETS[preset].config())
    assert sum(prod(spec.shape) for spec in specs.values()) == weights


def test_files_of_killed_processes_are_removed_and_those_being_written_stay(
    cache: Path, lines: list[str]
) -> None:
    import fcntl

    cache.mkdir(parents=True)
    dead, alive = cache / ".tiny-0.gguf.1.partial", cache / ".tiny-1.gguf.2.partial"
    dead.write_bytes(b"x")
    with alive.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with synthetic_models(["tiny"], PLAN, None, lines.append, str):
            assert alive.exists() and not dead.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_part_of_a_file(number: signal.Signals, cache: Path) -> None:
    main = "import sys; from quengine.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", main, "bench", "--synthetic", "llama-3.2-1b", "--device", "cpu"]
    with QuickPopen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        end = time.monotonic() + 120
        while not any(each.stat().st_size for each in cache.glob(".*.partial")):
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.01)  # or it takes a core from what it waits for
        running.send_signal(number)
        _, err = running.communicate(timeout=120)
    assert running.returncode == 128 + number
    assert list(cache.iterdir()) == [] and b"Traceback" not in err
