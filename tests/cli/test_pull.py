"""`engine pull`, `list` and `rm` with the real huggingface_hub client against a hub on loopback."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from quengine.cli.main import run
from quengine.models.hub import hub as model_names
from quengine.models.hub.hub import resolve_model
from quengine.models.hub.projectors import find_projector
from tests.hub_server import COMMIT, Hub, serve_hub

_sleep = time.sleep  # commands that run in this process are given another, which does not wait

REPO = "someone/Tiny-GGUF"
CHUNK = 10 * 2**20  # what huggingface_hub writes at once
BIG = random.Random(1).randbytes(2 * CHUNK + 3_000_000)
FILES = {
    "README.md": b"a model",
    "Tiny-Q4_K_M.gguf": BIG,
    "Tiny-Q4_K_S.gguf": BIG[:1000],
    "Tiny-Q8_0-00001-of-00003.gguf": BIG[1:2000],
    "Tiny-Q8_0-00002-of-00003.gguf": BIG[2:2000],
    "Tiny-Q8_0-00003-of-00003.gguf": BIG[3:2000],
    "deep/Tiny-F16.gguf": BIG[:700],
}
SEES = "someone/Seeing-GGUF"
OF_SEEING = {
    "Seeing-Q4_K_M.gguf": BIG[:1000],
    "Seeing-Q8_0.gguf": BIG[:2000],
    "deep/Seeing-Q2_K-00001-of-00002.gguf": BIG[:300],
    "deep/Seeing-Q2_K-00002-of-00002.gguf": BIG[1:300],
    "mmproj-Seeing-BF16.gguf": BIG[:40],
    "mmproj-Seeing-F16.gguf": BIG,
    "mmproj-Seeing-Q8_0.gguf": BIG[:20],
}


@pytest.fixture
def hub():
    with serve_hub(Hub(files={REPO: dict(FILES), SEES: dict(OF_SEEING)})) as served:
        yield served


@pytest.fixture
def env(hub, tmp_path):
    """The environment of a process of its own that uses the hub and a cache of its own."""
    kept = {key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGING"))}
    kept = {key: value for key, value in kept.items() if not key.lower().endswith("_proxy")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"}


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def engine(hub, tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, on the hub and a cache of its own."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("time.sleep", lambda *_: None)

    def engine(*args):
        capfd.readouterr()
        code = run(list(args))
        return Done(code, *capfd.readouterr())

    return engine


@pytest.fixture
def start(env):
    """Starts a command line as a process of its own, which Ctrl-C reaches even where the tests run detached."""
    started = []

    def start(*args, code="import sys; from quengine.cli.main import run; sys.exit(run(sys.argv[1:]))"):
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", code, *args],
            env=env,
            stdout=pipe,
            stderr=pipe,
            text=True,
            # A shell that starts a job in the background has it ignore SIGINT, and its children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def finish(process):
    stdout, stderr = process.communicate(timeout=120)
    return Done(process.returncode, stdout, stderr)


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never happened"
        _sleep(0.01)


def cache(tmp_path):
    return tmp_path / "hf" / "hub" / "models--someone--Tiny-GGUF"


def blobs(tmp_path):
    folder = cache(tmp_path) / "blobs"
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}


def only_error_line(done, exit_code):
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("engine: error:")]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_quantization_is_fetched_into_the_shared_cache_and_then_resolves_without_the_network(
    engine, hub, tmp_path
):
    done = engine("pull", f"hf:{REPO}:q4_k_m")
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.strip())
    assert path == cache(tmp_path) / "snapshots" / COMMIT / "Tiny-Q4_K_M.gguf"
    assert path.read_bytes() == BIG
    assert (cache(tmp_path) / "refs" / "main").read_text() == COMMIT
    assert list(blobs(tmp_path)) == [hashlib.sha256(BIG).hexdigest()]

    hub.requests.clear()
    again = engine("pull", "--offline", f"hf:{REPO}:Q4_K_M")
    assert (again.returncode, again.stdout) == (0, done.stdout)
    assert resolve_model(f"hf:{REPO}/Tiny-Q4_K_M.gguf") == path
    assert hub.requests == []


def test_the_help_lists_every_alias(engine):
    aliases = tomllib.loads((Path(model_names.__file__).parent / "catalogue.toml").read_text())
    done = engine("pull", "--help")
    listed = {line.split()[0]: line for line in done.stdout.splitlines() if line.strip()}
    assert (done.returncode, done.stderr) == (0, "")
    for alias, entry in aliases.items():
        assert entry["about"] in listed[alias]


def test_the_files_are_found_by_huggingface_hub_itself(engine):
    engine("pull", f"hf:{REPO}:Q4_K_S")
    found = huggingface_hub.try_to_load_from_cache(REPO, "Tiny-Q4_K_S.gguf", constants.HF_HUB_CACHE)
    assert Path(found).read_bytes() == FILES["Tiny-Q4_K_S.gguf"]


def test_all_shards_of_a_split_model_come_and_the_first_is_named(engine):
    done = engine("pull", f"hf:{REPO}:Q8_0")
    path = Path(done.stdout.strip())
    assert path.name == "Tiny-Q8_0-00001-of-00003.gguf"
    for name in (name for name in FILES if "-of-" in name):
        assert (path.parent / name).read_bytes() == FILES[name]


def test_a_file_in_a_folder_of_the_repository_is_fetched_by_its_path(engine):
    done = engine("pull", f"hf:{REPO}/deep/Tiny-F16.gguf")
    assert Path(done.stdout.strip()).read_bytes() == FILES["deep/Tiny-F16.gguf"]


@pytest.mark.parametrize(
    ("quant", "first"), [("Q4_K_M", "Seeing-Q4_K_M"), ("Q2_K", "deep/Seeing-Q2_K-00001-of-00002")]
)
def test_the_projector_comes_with_the_model_and_is_found_beside_it(engine, hub, quant, first):
    """F16 of several; from the root of the repository for a model in a folder of it."""
    done = engine("pull", f"hf:{SEES}:{quant}")
    path = Path(done.stdout.strip())
    assert path.as_posix().endswith(f"{first}.gguf")
    fetched = [name for name, _ in hub.gets]
    assert fetched[-1] == "mmproj-Seeing-F16.gguf" and len(fetched) == 1 + (2 if quant == "Q2_K" else 1)
    found = find_projector(path)
    assert found is not None and found.name == "mmproj-Seeing-F16.gguf" and found.read_bytes() == BIG


def test_a_projector_is_left_out_where_it_is_not_wanted(engine, hub):
    done = engine("pull", "--no-mmproj", f"hf:{SEES}:Q4_K_M")
    assert done.returncode == 0 and [name for name, _ in hub.gets] == ["Seeing-Q4_K_M.gguf"]
    assert find_projector(Path(done.stdout.strip())) is None
    assert engine("pull", f"hf:{SEES}:Q4_K_M").stdout == done.stdout
    assert [name for name, _ in hub.gets[1:]] == ["mmproj-Seeing-F16.gguf"]


def test_a_pull_that_failed_within_the_projector_goes_on_there(engine, hub):
    hub.cut_after, hub.down = [CHUNK + 1_000_000], False
    hub.files[SEES]["Seeing-Q4_K_M.gguf"] = BIG[:1000]
    hub.cut_after = [1000, CHUNK + 1_000_000]
    assert engine("pull", f"hf:{SEES}:Q4_K_M").returncode == 0
    assert [start for name, start in hub.gets if "mmproj" in name] == [None, f"bytes={CHUNK}-"]


def test_a_projector_belongs_to_its_models_in_lists_and_goes_with_the_last(engine):
    for quant in ("Q4_K_M", "Q8_0"):
        engine("pull", f"hf:{SEES}:{quant}")
    listed = {row["name"]: row for row in json.loads(engine("list", "--json").stdout)}
    names = [f"hf:{SEES}/Seeing-{quant}.gguf" for quant in ("Q4_K_M", "Q8_0")]
    ours = [name for name in listed if SEES in name]
    assert ours == names and all(
        listed[name]["projector"].endswith("mmproj-Seeing-F16.gguf") for name in ours
    )
    assert "(images: mmproj-Seeing-F16.gguf)" in engine("list").stdout
    path, projector = Path(listed[names[1]]["path"]), Path(listed[names[1]]["projector"])
    assert engine("rm", "-y", names[0]).returncode == 0
    assert path.exists() and projector.exists()
    assert "with mmproj-Seeing-F16.gguf" in engine("rm", "-y", names[1]).stderr
    assert not path.exists() and not projector.exists() and SEES not in engine("list").stdout


def test_a_small_file_outside_large_file_storage_is_checked_by_its_git_object_id(engine, hub):
    hub.small.add("Tiny-Q4_K_S.gguf")
    done = engine("pull", f"hf:{REPO}:Q4_K_S")
    assert Path(done.stdout.strip()).read_bytes() == FILES["Tiny-Q4_K_S.gguf"]
    hub.small.add("Tiny-Q4_K_M.gguf")
    hub.sent_instead["Tiny-Q4_K_M.gguf"] = BIG[::-1]
    assert "git sha1" in only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 1)


def test_a_connection_cut_once_is_taken_up_again_in_the_same_pull(engine, hub):
    hub.cut_after = [CHUNK + 1_000_000]
    done = engine("pull", f"hf:{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == BIG
    assert hub.gets == [("Tiny-Q4_K_M.gguf", None), ("Tiny-Q4_K_M.gguf", f"bytes={CHUNK}-")]


def test_a_pull_that_failed_midway_goes_on_where_it_stopped(engine, hub, tmp_path):
    hub.cut_after, hub.down = [CHUNK + 1_000_000], True
    failed = engine("pull", f"hf:{REPO}:Q4_K_M")
    line = only_error_line(failed, 2)
    assert "10.49 MB of 23.97 MB is kept" in line
    assert "pull again" in line
    assert not (cache(tmp_path) / "snapshots").exists()

    hub.down = False
    hub.gets.clear()
    done = engine("pull", f"hf:{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == BIG
    assert hub.gets == [("Tiny-Q4_K_M.gguf", f"bytes={CHUNK}-")]
    assert list(blobs(tmp_path)) == [hashlib.sha256(BIG).hexdigest()]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_pull_stopped_by_a_signal_goes_on_where_it_stopped(engine, start, hub, tmp_path, how):
    hub.hold = threading.Event()
    first = start("pull", f"hf:{REPO}:Q4_K_M")
    assert hub.halfway.wait(120)
    partial = cache(tmp_path) / "blobs" / f"{hashlib.sha256(BIG).hexdigest()}.incomplete"
    # What the hub has sent may be in the sockets still: only what was written is there to go on from.
    wait_until(lambda: partial.exists() and partial.stat().st_size > 0)
    first.send_signal(how)
    stopped = finish(first)
    hub.hold.set()
    hub.hold = None
    assert stopped.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in stopped.stderr
    had = partial.stat().st_size
    assert 0 < had < len(BIG) and partial.read_bytes() == BIG[:had]

    hub.gets.clear()
    done = engine("pull", f"hf:{REPO}:Q4_K_M")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == BIG
    assert hub.gets == [("Tiny-Q4_K_M.gguf", f"bytes={had}-")]


def test_a_file_with_the_wrong_digest_is_refused_deleted_and_named(engine, hub, tmp_path):
    hub.sent_instead["Tiny-Q4_K_M.gguf"] = BIG[:-1] + bytes([BIG[-1] ^ 1])
    line = only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 1)
    assert "Tiny-Q4_K_M.gguf" in line
    assert hashlib.sha256(BIG).hexdigest() in line
    assert blobs(tmp_path) == {}
    assert not (cache(tmp_path) / "snapshots").exists()
    hub.sent_instead.clear()
    assert engine("pull", f"hf:{REPO}:Q4_K_M").returncode == 0


def test_a_corrupt_partial_file_is_caught_by_the_digest(engine, hub, tmp_path):
    partial = cache(tmp_path) / "blobs" / f"{hashlib.sha256(BIG).hexdigest()}.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 1000)
    only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 1)
    assert hub.gets == [("Tiny-Q4_K_M.gguf", "bytes=1000-")]
    assert not partial.exists()


def test_too_little_disk_is_said_before_anything_is_fetched(engine, hub, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda *_: usage(10**9, 0, 20_000_000))
    line = only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 2)
    assert "23.97 MB" in line and "20.00 MB" in line
    assert hub.gets == []
    assert engine("pull", f"hf:{REPO}:Q4_K_S").returncode == 0


def test_a_disk_that_fills_up_midway_is_said_and_the_part_is_kept(engine, start, hub):
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (12_000_000, 12_000_000))\n"
        "from quengine.cli.main import run\n"
        "sys.exit(run(sys.argv[1:]))"
    )
    line = only_error_line(finish(start("pull", f"hf:{REPO}:Q4_K_M", code=code)), 2)
    assert "12.00 MB of 23.97 MB is kept" in line
    hub.gets.clear()
    assert engine("pull", f"hf:{REPO}:Q4_K_M").returncode == 0
    assert hub.gets == [("Tiny-Q4_K_M.gguf", "bytes=12000000-")]


def test_of_two_pulls_at_once_one_fetches_and_the_other_waits_for_it(start, hub):
    hub.hold = threading.Event()
    first = start("pull", f"hf:{REPO}:Q4_K_M")
    assert hub.halfway.wait(120)
    second = start("pull", f"hf:{REPO}:Q4_K_M")
    assert "being pulled by another process" in second.stderr.readline()
    hub.hold.set()
    out = [process.communicate(timeout=120)[0] for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert out[0] == out[1]
    assert Path(out[0].strip()).read_bytes() == BIG
    assert hub.gets == [("Tiny-Q4_K_M.gguf", None)]


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_never_asks_the_network_and_says_what_is_missing(engine, hub, monkeypatch, by_variable):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    line = only_error_line(engine("pull", *([] if by_variable else ["--offline"]), f"hf:{REPO}:Q4_K_M"), 1)
    assert "offline" in line
    assert hub.requests == []


def test_a_quantization_that_is_not_there_lists_what_is(engine):
    line = only_error_line(engine("pull", f"hf:{REPO}:Q5_K_M"), 1)
    for name in ("Tiny-Q4_K_M.gguf", "Tiny-Q4_K_S.gguf", "2 more shards"):
        assert name in line


def test_a_name_that_fits_several_files_lists_them(engine):
    line = only_error_line(engine("pull", f"hf:{REPO}"), 1)
    assert "Tiny-Q4_K_M.gguf" in line and "Tiny-Q4_K_S.gguf" in line
    assert "mmproj" not in line


def test_unknown_and_gated_repositories_are_told_apart(engine, hub):
    assert "no such repository" in only_error_line(engine("pull", "hf:no/where:Q4_0"), 1)
    hub.gated.add(REPO)
    assert "gated" in only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 1)


def test_a_hub_that_does_not_answer_is_one_line(engine, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    line = only_error_line(engine("pull", f"hf:{REPO}:Q4_K_M"), 2)
    assert line.endswith("cannot reach http://127.0.0.1:9: Connection refused")


def test_list_shows_what_is_here_and_rm_deletes_it_after_a_yes(engine, tmp_path):
    engine("pull", f"hf:{REPO}:Q4_K_M", f"hf:{REPO}:Q8_0")
    rows = {row["name"]: row for row in json.loads(engine("list", "--json").stdout)}
    one, split = f"hf:{REPO}/Tiny-Q4_K_M.gguf", f"hf:{REPO}/Tiny-Q8_0-00001-of-00003.gguf"
    assert (rows[one]["size"], rows[one]["quant"]) == (len(BIG), "Q4_K_M")
    assert (rows[split]["size"], rows[split]["quant"]) == (1999 + 1998 + 1997, "Q8_0")
    assert Path(rows[split]["path"]).is_file()
    assert one in engine("list").stdout

    only_error_line(engine("rm", one), 1)
    assert Path(rows[one]["path"]).exists()

    assert engine("rm", "-y", one).returncode == 0
    assert len(blobs(tmp_path)) == 3
    assert [name for name in engine("list").stdout.split() if name.startswith("hf:")] == [split]
    assert engine("rm", "--yes", f"hf:{REPO}:Q8_0").returncode == 0
    assert not cache(tmp_path).exists()
    assert "not on this machine" in only_error_line(engine("rm", "-y", one), 1)


def test_rm_keeps_a_blob_that_another_file_still_uses(engine, hub, tmp_path):
    hub.files[REPO]["Copy-Q4_K_M-2.gguf"] = BIG
    engine("pull", f"hf:{REPO}/Tiny-Q4_K_M.gguf", f"hf:{REPO}/Copy-Q4_K_M-2.gguf")
    assert engine("rm", "-y", f"hf:{REPO}/Tiny-Q4_K_M.gguf").returncode == 0
    assert (cache(tmp_path) / "snapshots" / COMMIT / "Copy-Q4_K_M-2.gguf").read_bytes() == BIG


def test_list_all_shows_the_aliases_that_can_be_pulled(engine):
    shown = engine("list", "--all").stdout
    (row,) = [line for line in shown.splitlines() if line.startswith("mistral-7b-q4k")]
    assert "4.37 GB" in row and "Q4_K_M" in row and "(not pulled)" in row


def test_pull_of_a_file_that_is_here_prints_its_path(engine, tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")
    assert engine("pull", str(path)).stdout.strip() == str(path)
