"""The CPU's kernels that are compiled ahead are those that requests of every kind ask for."""

import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from quengine import LLM, SamplingParams
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.gemv.amx_rows import LEAST_ROWS, TYPES
from quengine.kernels.cpu.runtime import kernel_table
from quengine.kernels.cpu.runtime.code_store import CodeStore, code_store
from quengine.kernels.cpu.runtime.kernel_table import KernelName
from quengine.kernels.cuda.backend import CudaBackend
from quengine.kernels.forward_batch import ForwardBatch
from quengine.kernels.kv.cache_types import CACHE_TYPES
from quengine.kernels.offload.split_experts import SplitExperts
from quengine.models.architectures import layers_of
from quengine.models.blocks.experts import Experts
from quengine.models.checkpoint import open_checkpoint
from quengine.models.experts import MixtureOfExperts
from quengine.models.layers import LayerTensors
from quengine.models.synthetic.synthetic import write_synthetic
from quengine.runners import cpu_kernels
from tests.quick_python import run

GREEDY, SAMPLED = SamplingParams(temperature=0, max_tokens=3), SamplingParams(temperature=1.0, max_tokens=3)


@pytest.mark.parametrize("preset", ["tiny", "mixtral-tiny", "gpt-oss-tiny"])
def test_requests_of_every_kind_ask_for_no_other_kernel(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_synthetic(tmp_path / "m.gguf", preset)
    asked: set[KernelName] = set()
    kernel = kernel_table.kernel

    def noted(*name: str | bool) -> int:
        asked.add(name)
        return kernel(*name)

    monkeypatch.setattr(kernel_table, "kernel", noted)
    checkpoint = open_checkpoint(path)
    known = cpu_kernels.kernels_of(checkpoint)
    checkpoint.close()
    asked.clear()  # the threads that compute have kernels of their own
    for cache_type in CACHE_TYPES:
        options = {"ctx_size": 256, "cache_type": cache_type, "parallel": LEAST_ROWS, "draft_ngram": 2}
        with LLM(path, "cpu", **options) as llm:
            ids = llm.encode("the cat sat on the mat and the cat sat")
            llm.generate([ids[:1]] * LEAST_ROWS, GREEDY)  # on tiles, where there are some
            llm.generate([ids, ids[:5], ids[:1]], GREEDY)
            llm.generate([ids, ids[:5], ids[:1]], SAMPLED)
    assert len(asked) > 20 and asked <= set(known)


def test_products_of_batches_on_tiles_are_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", "tiny"))
    types = {w.format.name for w in checkpoint.tensors.values()} & TYPES
    for rows, wanted in ((LEAST_ROWS, types), (LEAST_ROWS + 1, set())):
        monkeypatch.setattr(
            cpu_kernels, "uses_amx_rows", lambda w, n, r=rows: n >= r and w.format.name in TYPES
        )
        names = cpu_kernels.kernels_of(checkpoint)
        assert types and {name[2] for name in names if name[1] == "amx_matvec_kernel"} == wanted
    checkpoint.close()


@pytest.mark.cuda_kernel
@pytest.mark.parametrize("preset", ["mixtral-tiny", "gpt-oss-tiny"])
def test_experts_in_host_memory_ask_for_no_other_kernel(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: set[KernelName] = set()
    kernel = kernel_table.kernel

    def noted(*name: str | bool) -> int:
        asked.add(name)
        return kernel(*name)

    monkeypatch.setattr(kernel_table, "kernel", noted)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    checkpoint = open_checkpoint(write_synthetic(tmp_path / "m.gguf", preset))
    host = CpuBackend(2)
    known, config = cpu_kernels.kernels_of_experts(checkpoint), checkpoint.config
    asked.clear()  # the threads that compute have kernels of their own
    assert config.experts is not None
    sizes = config.embedding_length, config.experts.router.used, config.experts.count
    experts = SplitExperts(CudaBackend(device), host, 1, 64, *sizes)
    (block, *_), tensors = layers_of(config), LayerTensors(checkpoint.tensors, 0, experts.device, 1e-6)
    assert isinstance(block.feed_forward, Experts)
    layer = MixtureOfExperts(block.feed_forward, tensors, experts.of_layer(0))
    for phase, rows in product(("decode", "prefill"), (1, 3)):
        ids = torch.zeros(rows, dtype=torch.int64, device=device)
        batch = ForwardBatch(phase, ids, ids.int(), ids[None, :, None].int())
        y = layer(batch, torch.randn(rows, config.embedding_length, device=device), None)
        assert isinstance(y, torch.Tensor) and y.isfinite().all()
    checkpoint.close()
    assert len(asked) > 8 and asked <= set(known)


@pytest.mark.timeout(1500)  # a guard: beside a load of 10 processes of the lowest priority take long
def test_a_second_start_compiles_nothing_whatever_it_is_asked(tmp_path: Path) -> None:
    path, folder = write_synthetic(tmp_path / "m.gguf", "tiny"), tmp_path / "kernels"
    # What is compiled is in question, not how well.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "NUMBA_OPT": "0"}
    program = "import sys; from quengine.cli.main import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        program,
        "-v",
        "generate",
        "-m",
        str(path),
        "--device",
        "cpu",
        "--raw",
        "the cat",
        "-n",
        "3",
    ]

    def err(*flags: str) -> str:
        done = run([*command, *flags], env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stderr

    first = err("--temp", "0")
    assert "once; later runs find them on disk" in first and "info: compiled " in first
    checkpoint = open_checkpoint(path)
    names = {kernel_table.file_name(name) for name in cpu_kernels.kernels_of(checkpoint)}
    checkpoint.close()
    end = time.monotonic() + 600
    while not names <= {each.name for each in folder.rglob("*")}:
        assert time.monotonic() < end
        time.sleep(0.1)
    later = err("--temp", "1", "--cache-type", "q8_0", "--draft-ngram", "2")
    assert "compiling kernels" not in later and "info: compiled " not in later


def test_the_bar_counts_what_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, folder = write_synthetic(tmp_path / "m.gguf", "tiny"), tmp_path / "kernels"
    store = CodeStore([folder], "1")
    folder.mkdir(mode=0o700)
    started: list[list[KernelName]] = []
    shown: list[str] = []
    monkeypatch.setattr(cpu_kernels, "code_store", lambda: store)
    monkeypatch.setattr(kernel_table, "watcher", None)
    monkeypatch.setattr(cpu_kernels, "_start", started.append)
    monkeypatch.setattr(cpu_kernels, "_running", [])
    monkeypatch.setattr(cpu_kernels, "_ahead", [])
    checkpoint = open_checkpoint(path)
    cpu_kernels.kernels_of(checkpoint)
    said: list[None] = []
    monkeypatch.setattr(kernel_table, "say_once", lambda: said.append(None))
    cpu_kernels.compile_ahead(checkpoint, shown.append)
    assert not said  # the user waits for none of them yet
    names = cpu_kernels.kernels_of(checkpoint)
    assert sorted(str(name) for part in started for name in part) == sorted(map(str, names))
    store.write(kernel_table.file_name(names[0]), b"code")
    assert kernel_table.watcher is not None
    kernel_table.watcher(True)
    kernel_table.watcher(False)
    assert shown == [f"compiling kernels for this processor: 1 of {len(names)}", ""]
    for name in names:
        store.write(kernel_table.file_name(name), b"code")
    started.clear()
    cpu_kernels.compile_ahead(checkpoint, shown.append)
    checkpoint.close()
    assert not started


NAME: KernelName = ("ops.add_kernels", "add_kernel")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CodeStore:
    """An empty store, of this process and of those that it starts."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    store = code_store.__wrapped__()
    monkeypatch.setattr(cpu_kernels, "code_store", lambda: store)
    return store


def test_a_process_compiles_what_it_is_told_and_ends(store: CodeStore) -> None:
    store.folders[0].mkdir(mode=0o700, parents=True)
    with cpu_kernels._start([NAME]) as process:
        assert process.wait() == 0
    assert store.read(kernel_table.file_name(NAME)) is not None


def test_a_process_whose_folder_is_gone_compiles_nothing(store: CodeStore) -> None:
    with cpu_kernels._start([NAME]) as process:
        assert process.wait() == 0
    assert not store.has_folder()


def test_what_is_measured_waits_for_no_process_of_low_priority(
    store: CodeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other: KernelName = ("ops.add_kernels", "scale_kernel")
    store.write(kernel_table.file_name(other), b"code")
    compiled: list[KernelName] = []
    monkeypatch.setattr(kernel_table, "kernel", lambda *name: compiled.append(name))
    endless = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    monkeypatch.setattr(cpu_kernels, "_running", [endless])
    monkeypatch.setattr(cpu_kernels, "_ahead", [NAME, other])
    cpu_kernels.finish_compiling()
    assert compiled == [NAME] and endless.returncode == -signal.SIGTERM
    assert not cpu_kernels._running and not cpu_kernels._ahead
