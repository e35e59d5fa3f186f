"""Which folders code is loaded from: those that only this user can have written, proven by a secret."""

import os
import stat
from pathlib import Path

import pytest

from quengine.kernels import private_folder
from quengine.kernels.private_folder import (
    KEY_BYTES,
    ForeignFolderError,
    check_owner,
    check_private,
    folder_key,
    user_cache,
)

STRANGER = 54321


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path belongs to another user from now on; without root's right to do that, we are another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_folder_of_another_user_is_foreign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    check_owner(folder)
    give_away(folder, monkeypatch)
    for check in (check_owner, check_private, lambda path: folder_key(path, make=True)):
        with pytest.raises(ForeignFolderError, match="belongs to user") as caught:
            check(folder)
        assert "belongs to user" in caught.value.strerror
    assert stat.S_IMODE(folder.stat().st_mode) == mode and not list(folder.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_link_of_another_user_is_foreign_and_ones_own_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to("real")
    check_private(link)
    give_away(link, monkeypatch)
    with pytest.raises(ForeignFolderError, match=f"a link that belongs to user {STRANGER}"):
        check_owner(link)


def test_a_folder_that_anybody_can_exchange_is_foreign(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(ForeignFolderError, match="anybody can exchange it"):
        check_owner(folder)
    tmp_path.chmod(0o1777)  # as /tmp
    check_private(folder)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ForeignFolderError, match="not a folder"):
        check_owner(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        check_owner(tmp_path / "none")


@pytest.mark.parametrize(
    ("mode", "own_group", "private"),
    [(0o755, False, True), (0o757, False, False), (0o775, False, False), (0o775, True, True)],
)
def test_a_folder_that_others_can_write_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, own_group: bool, private: bool
) -> None:
    monkeypatch.setattr(private_folder, "_own_group", lambda _: own_group)
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(mode)
    if private:
        check_private(folder)
    else:
        with pytest.raises(ForeignFolderError, match=f"its mode is 0{mode:o}"):
            check_private(folder)


def test_a_folder_gets_one_secret_that_only_its_user_can_read(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    assert folder_key(folder, make=False) is None
    key = folder_key(folder, make=True)
    assert key is not None and len(key) == KEY_BYTES
    assert folder_key(folder, make=True) == folder_key(folder, make=False) == key
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (file,) = folder.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (tmp_path / "other").mkdir()
    assert folder_key(tmp_path / "other", make=True) != key


def spoil(path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = path.read_bytes()
    if how == "readable by others":
        path.chmod(0o644)
    elif how == "short":
        path.write_bytes(data[:-1])
    elif how == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    elif how == "a pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif how == "another user's":
        give_away(path, monkeypatch)
    else:
        path.parent.chmod(0o777)  # others may have put it there


@pytest.mark.parametrize(
    "how", ["readable by others", "short", "a link", "a pipe", "another user's", "in an open folder"]
)
def test_a_secret_that_may_not_be_one_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "another user's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    key = folder_key(tmp_path, make=True)
    spoil(tmp_path / private_folder.KEY_NAME, how, monkeypatch)
    assert folder_key(tmp_path, make=False) is None
    made = folder_key(tmp_path, make=True)
    assert made is not None and made != key
    assert folder_key(tmp_path, make=False) == made


def test_without_a_home_folder_there_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "quengine"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "quengine"
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does for a user without an entry
    assert user_cache() is None
