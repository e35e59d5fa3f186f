"""`engine kernels`: its commands, and what it refuses."""

import io
import json
from pathlib import Path

import pytest

from quengine.cli.main import run
from quengine.kernels.cuda.launch.compile_messages import Built
from quengine.kernels.cuda.launch.kernel_pack import write_pack
from quengine.kernels.cuda.launch.triton_cache import CheckedCache, use_private_cache

KEY = "A" * 52


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    use_private_cache.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def pack(tmp_path: Path, cache: Path) -> Path:
    cache.mkdir(mode=0o700)
    manager = CheckedCache(KEY)
    manager.put_group("_f.json", {name: manager.put(b"{}", name) for name in ("_f.cubin", "_f.json")})
    write_pack(tmp_path / "pack.zip", [Built(KEY, "f", None)], ["sm_90"], ["tiny"])
    return tmp_path / "pack.zip"


def test_a_pack_is_installed_listed_and_cleared(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["kernels", "clear", "-y"]) == 0
    assert "1 kernels deleted" in capsys.readouterr().err
    assert run(["kernels", "install", str(pack)]) == 0
    assert "1 kernels installed, for sm_90, Triton" in capsys.readouterr().err
    assert run(["kernels", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("pack.zip: 1 kernels, ") and lines[0].endswith(": tiny")
    assert "1 kernels" in lines[1]
    assert run(["kernels", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kernels"] == 1 and told["packs"][0]["whole"] == 1 and told["packs"][0]["current"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["install", "nowhere.zip"], "nowhere.zip: no such file; `engine kernels build` writes packs"),
        (["install", "."], ".: not a file; `engine kernels build` writes packs"),
        (["clear"], "deleting needs a yes"),
        (["build", "--models", "tiny", "--arch", "sm_70", "-o", "pack.zip"], "no kernels for 'sm_70'"),
        (["build", "--models", "nix", "-o", "pack.zip"], "nix"),
        (["build", "--models", "tiny", "-o", "."], "is a folder"),
        (["build", "--models", "tiny", "-o", "nowhere/pack.zip"], "nowhere: no such folder"),
        (["build", "--models", "tiny", "--cache-type", "f8", "-o", "p.zip"], "no cache type 'f8'"),
        (["build", "-o", "pack.zip"], "--models"),
        (["frob"], "no such command 'frob'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert run(["kernels", *arguments]) in (1, 2)
    error = capsys.readouterr().err
    assert message in error.splitlines()[0], error
    assert "Traceback" not in error


@pytest.mark.parametrize("arguments", [["kernels", "--help"], ["kernels"], ["help", "kernels"]])
def test_its_help_ends_with_its_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 0
    out, error = capsys.readouterr()
    assert not error
    assert out.index("Examples") < out.index("engine kernels install pack.zip")
