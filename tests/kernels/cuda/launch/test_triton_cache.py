"""Triton keeps its kernels where nobody else can put some; it loads what it finds."""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.runtime.cache import FileCacheManager

from quengine.kernels.cuda.launch import triton_cache
from quengine.kernels.cuda.launch.triton_cache import CheckedCache, use_private_cache


@pytest.fixture(autouse=True)
def once_again() -> Iterator[None]:
    """The check runs once in a process."""
    use_private_cache.cache_clear()
    yield
    use_private_cache.cache_clear()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the user chose, and another place for the user's caches beside it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "chosen"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path


def where_triton_writes() -> Path:
    return Path(FileCacheManager("kernel").cache_dir).parent


def test_a_private_folder_is_used_as_it_is(caches: Path, caplog: pytest.LogCaptureFixture) -> None:
    use_private_cache()
    assert where_triton_writes() == caches / "chosen"
    assert stat.S_IMODE((caches / "chosen").stat().st_mode) == 0o700
    assert not caplog.records


@pytest.mark.parametrize("fault", ["mode", "owner", "file"])
def test_another_is_used_in_place_of_one_that_others_can_write(
    caches: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    chosen, own = caches / "chosen", caches / "xdg" / "quengine" / "triton"
    if fault == "file":
        chosen.touch()
    else:
        chosen.mkdir()
        chosen.chmod(0o777)
    if fault == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root gives files away")
        chosen.chmod(0o700)
        os.chown(chosen, 54321, 54321)
    with caplog.at_level(logging.WARNING, "quengine"):
        use_private_cache()
        use_private_cache()
    assert where_triton_writes() == own
    (record,) = caplog.records
    assert str(chosen) in record.getMessage() and str(own) in record.getMessage()
    assert not chosen.is_dir() or not list(chosen.iterdir())
    assert os.environ["TRITON_CACHE_DIR"] == str(own)  # for child processes


def test_where_no_folder_is_private_a_temporary_one_is(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (caches / "chosen").touch()
    (caches / "xdg").touch()
    kept: list[object] = []
    monkeypatch.setattr(
        triton_cache.atexit, "register", lambda remove, *given, **_: kept.append((remove, *given))
    )
    monkeypatch.setattr("tempfile.tempdir", str(caches))
    use_private_cache()
    folder = where_triton_writes()
    assert folder.parent == caches and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert kept == [(triton_cache.shutil.rmtree, folder)]
    assert Path(triton.knobs.cache.dir) == folder


@pytest.mark.usefixtures("caches")
def test_a_file_that_was_changed_counts_as_none() -> None:
    """As the C code that launches kernels is kept: not in a group."""
    use_private_cache()
    cache = CheckedCache("folder")
    path = Path(cache.put(b"code", "launcher.so"))
    assert cache.get_file("launcher.so") == str(path) and cache.read("launcher.so") == b"code"
    path.write_bytes(b"c0de")
    assert cache.get_file("launcher.so") is None and cache.read("launcher.so") is None
    cache.put(b"code", "launcher.so")
    assert cache.get_file("launcher.so") == str(path)
    assert CheckedCache("other").get_file("launcher.so") is None


def test_a_folder_that_others_can_read_becomes_private(caches: Path) -> None:
    (caches / "chosen").mkdir(mode=0o755)
    use_private_cache()
    CheckedCache("folder").put(b"code", "kernel.cubin")
    assert stat.S_IMODE((caches / "chosen").stat().st_mode) == 0o700
    assert stat.S_IMODE((caches / "chosen" / "key").stat().st_mode) == 0o600
