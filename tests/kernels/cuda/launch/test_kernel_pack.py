"""Packs of kernels: what was packed is there after installing, and what is damaged, alien or too large is refused."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from quengine.errors import EngineError
from quengine.kernels.cuda.launch import kernel_pack, triton_cache
from quengine.kernels.cuda.launch.compile_messages import Built
from quengine.kernels.cuda.launch.kernel_pack import (
    cache_summary,
    clear_kernels,
    install_pack,
    installed_packs,
    write_pack,
)
from quengine.kernels.cuda.launch.launcher import LauncherSpec
from quengine.kernels.cuda.launch.triton_cache import CheckedCache, kernel_names

KEYS = ("A" * 52, "B" * 52)
SPEC = LauncherSpec(("*fp32", ("*i32", "constexpr"), "i64"), "null")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use(tmp_path / "cache", monkeypatch)


def use(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    return folder


def put_kernel(key: str, code: bytes = b"machine code") -> Built:
    """As Triton keeps one that it has compiled."""
    manager = CheckedCache(key)
    group = {
        name: manager.put(data, name) for name, data in (("_f.cubin", code), ("_f.json", '{"name": "f"}'))
    }
    group["_f.source"] = manager.put("text", "_f.source")
    manager.put_group("_f.json", group)
    return Built(key, "f", SPEC)


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    path = tmp_path / "pack.zip"
    write_pack(path, [put_kernel(key, key.encode() * 100) for key in KEYS], ["sm_90"], ["tiny"])
    return path


def test_a_pack_brings_its_kernels_into_another_cache(
    tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = use(tmp_path / "other", monkeypatch)
    told = install_pack(pack)
    assert (told.targets, told.models, set(told.launchers)) == (("sm_90",), ("tiny",), {SPEC})
    for key in KEYS:
        assert kernel_names(other / key) == ["_f"]
        group = CheckedCache(key).get_group("_f.json")
        assert group is not None and set(group) == {"_f.cubin", "_f.json"}
        assert Path(group["_f.cubin"]).read_bytes() == key.encode() * 100
        assert Path(group["_f.cubin"]).parent == other / key
    (installed,) = installed_packs()
    assert (installed.name, installed.whole, installed.is_current) == ("pack.zip", 2, True)


def test_the_same_kernels_make_the_same_bytes(tmp_path: Path, pack: Path) -> None:
    again = tmp_path / "again.zip"
    write_pack(again, [Built(key, "f", SPEC) for key in KEYS], ["sm_90"], ["tiny"])
    assert again.read_bytes() == pack.read_bytes()


def test_a_kernel_that_is_not_there_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="f was not compiled: no registers"):
        write_pack(tmp_path / "pack.zip", [Built("C" * 52, "f", None, "no registers")], ["sm_90"], ["tiny"])
    assert not list(tmp_path.glob("*pack.zip*"))


def rewritten(pack: Path, change: Callable[[dict[str, bytes]], None]) -> Path:
    """The pack with its files changed."""
    with zipfile.ZipFile(pack) as file:
        files = {name: file.read(name) for name in file.namelist()}
    change(files)
    with zipfile.ZipFile(pack, "w") as file:
        for name, data in files.items():
            file.writestr(name, data)
    return pack


def with_manifest(pack: Path, **fields: Any) -> Path:
    def change(files: dict[str, bytes]) -> None:
        files["manifest.json"] = json.dumps({**json.loads(files["manifest.json"]), **fields}).encode()

    return rewritten(pack, change)


def nothing_was_installed(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if path.name != "key" and any(path.iterdir())]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"triton": "other", "triton_version": "3.0.0"}, r"is for Triton 3\.0\.0, and this is Triton"),
        ({"triton": "other"}, "of another build"),
        ({"source": "00"}, "has the kernels of another version of the engine"),
        ({"format": 2}, "its manifest: format 2, not 1"),
        ({"kernels": {"../../etc": {"_f.cubin": "", "_f.json": ""}}}, "is no kernel's folder"),
        ({"kernels": {"A" * 52: {"../_f.cubin": "", "../_f.json": ""}}}, "is no kernel's folder"),
        ({"kernels": {"A" * 52: {"_f.so": "", "_f.json": ""}}}, "is no kernel's folder"),
        ({"kernels": {"A" * 52: {"_f.cubin": "", "_g.json": ""}}}, "is no kernel's folder"),
        ({"kernels": 5}, "is no pack of kernels"),
        ({"launchers": [[1]]}, "is no pack of kernels"),
    ],
)
def test_a_pack_for_others_or_with_a_strange_manifest_is_refused(
    tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], message: str
) -> None:
    other = use(tmp_path / "other", monkeypatch)
    with pytest.raises(EngineError, match=message) as error:
        install_pack(with_manifest(pack, **fields))
    assert "\n" not in str(error.value)
    assert nothing_was_installed(other)


@pytest.mark.parametrize("fault", ["altered", "missing", "truncated", "text", "too large", "no manifest"])
def test_a_damaged_pack_is_refused_and_nothing_of_it_stays(
    tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    other = use(tmp_path / "other", monkeypatch)
    last = f"{KEYS[-1]}/_f.cubin"
    if fault == "altered":
        rewritten(pack, lambda files: files.update({last: files[last][:-1] + b"x"}))
    elif fault == "missing":
        rewritten(pack, lambda files: files.pop(last) and None)
    elif fault == "no manifest":
        rewritten(pack, lambda files: files.pop("manifest.json") and None)
    elif fault == "truncated":
        os.truncate(pack, pack.stat().st_size // 2)
    elif fault == "text":
        pack.write_text("no zip file")
    else:
        monkeypatch.setattr(kernel_pack, "_MOST_BYTES", 1000)
    with pytest.raises(EngineError, match=r"pack\.zip is (no pack of kernels|damaged)"):
        install_pack(pack)
    assert nothing_was_installed(other)


def test_what_the_manifest_does_not_list_is_left_in_the_pack(
    tmp_path: Path, pack: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = use(tmp_path / "other", monkeypatch)
    rewritten(pack, lambda files: files.update({"../escaped": b"x", f"{'C' * 52}/_f.cubin": b"x"}))
    install_pack(pack)
    assert not (tmp_path / "escaped").exists() and not (other / ("C" * 52)).exists()


def test_a_pack_of_another_version_is_shown_as_such(
    pack: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    install_pack(pack)
    (cache / KEYS[0] / "_f.cubin").write_bytes(b"damaged")
    monkeypatch.setattr(kernel_pack, "source_stamp", lambda: b"another")
    (installed,) = installed_packs()
    assert (installed.whole, installed.is_current) == (1, False)


def test_clearing_leaves_what_others_put_there(cache: Path, pack: Path) -> None:
    install_pack(pack)
    foreign = cache / ("F" * 52)
    foreign.mkdir()
    (foreign / "kernel.cubin").touch()
    assert cache_summary().kernels == len(KEYS)
    clear_kernels()
    assert cache_summary().kernels == 0 and installed_packs() == []
    assert sorted(path.name for path in cache.iterdir()) == [foreign.name, "key"]


def test_a_cache_may_be_moved(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_kernel(KEYS[0])
    moved = cache.rename(tmp_path / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    group = CheckedCache(KEYS[0]).get_group("_f.json")
    assert group is not None and Path(group["_f.cubin"]).parent == moved / KEYS[0]


def test_triton_keeps_kernels_through_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "manager_class", None)
    triton_cache.use_private_cache.cache_clear()
    triton_cache.use_private_cache()
    assert triton.knobs.cache.manager_class is CheckedCache
    triton_cache.use_private_cache.cache_clear()
