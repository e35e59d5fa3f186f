"""Kernels are compiled by other processes, each once; who needs one waits for it, and what is broken is built anew."""

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from quengine.kernels.cuda.launch import compile_processes
from quengine.kernels.cuda.launch.compile_ahead import compiled_marker
from quengine.kernels.cuda.launch.compile_messages import CRASHED, Built, Order
from quengine.kernels.cuda.launch.gpu import Gpu
from tests.fork_server import without_interpreter

POOL = (
    f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[4])!r})
"""
    + """
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
import torch, triton
from functools import partial
from pathlib import Path
from quengine.kernels.cuda.launch import compile_ahead, compile_processes, compiler_process, triton_cache
from quengine.kernels.cuda.launch.compile_ahead import CompilePool, finish_compiling
from quengine.kernels.cuda.launch.compile_messages import CRASHED
from quengine.kernels.cuda.launch.gpu import Gpu
from quengine.kernels.cuda.launch.record_kernels import record_kernels
from quengine.kernels.cuda.sampling import batch_rows
from tests.kernels.cuda.launch.small_kernels import Forked, broken, stages, stops

start, compiler_process.ChildProcess = compiler_process.ChildProcess, Forked

GPU = Gpu("GPU X", (9, 0))
SIZES = (1, 2, 4)
ROOT = Path(sys.argv[1])

def pool(sizes=SIZES, processes=2, **given):
    return CompilePool(partial(stages, sizes), GPU, processes, **given)

def stopped(sizes=SIZES, processes=1):
    '''One whose process has recorded all kernels and waits for SIGCONT.'''
    made = CompilePool(partial(stops, sizes), GPU, processes)
    os.waitpid(made._process.pid, os.WUNTRACED)
    return made

def compilations(sizes=SIZES):
    '''How many of them this process would compile.'''
    misses = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
    for kernel in record_kernels(stages(sizes), GPU).values():
        kernel.compile()
    triton.knobs.compilation.listener = None
    return sum(misses)
"""
)


def test_a_process_compiles_nothing_that_others_have_compiled(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
lines = []
done = ROOT / "marker"
compiler_process.ChildProcess = start  # once as it is, and started before it is known what is to be compiled, and where
del os.environ["TRITON_CACHE_DIR"]
compiler_process.start_ahead("")
os.environ["TRITON_CACHE_DIR"] = sys.argv[1]
first = pool(progress=lines.append, marker=done)
built = first.finish()
assert sorted(kernel.name for kernel in built) == ["place_kernel"] * 3 and not any(kernel.error for kernel in built)
assert done.is_file() and first.complete and not compiler_process._waiting
compiler_process.ChildProcess = Forked
assert compilations() == 0 and compilations((8,)) == 1
assert pool().finish() == [], "nothing is missing"
assert len(pool(every=True).finish()) == 3
assert not triton_cache.when_missing
""",
        tmp_path / "cache",
    )


def test_a_kernel_that_is_there_is_not_waited_for(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
there = list(record_kernels(stages((1,)), GPU))[0]
pool((1,)).finish()
asked = []
triton_cache.when_missing.append(asked.append)
assert triton_cache.CheckedCache(there).get_group("_place_kernel.json") and not asked
assert triton_cache.CheckedCache("A" * 52).get_group("_place_kernel.json") is None and asked == ["A" * 52]
""",
        tmp_path / "cache",
    )


def test_who_looks_a_kernel_up_waits_for_it_and_it_comes_next(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
sizes = (1, 2, 4, 8, 16, 64)
last = list(record_kernels(stages(sizes), GPU))[-1]
ahead = stopped(sizes)
ask = ahead._channel.send
ahead._channel.send = lambda key: (ask(key), os.kill(ahead._process.pid, signal.SIGCONT))
folder = triton_cache.CheckedCache(last)
assert folder.get_group("_place_kernel.json").keys() == {"_place_kernel.json", "_place_kernel.cubin"}
assert len(ahead._pending) == len(sizes) - 2, "the first was under way"
finish_compiling()
assert compilations(sizes) == 0
""",
        tmp_path / "cache",
    )


def test_a_broken_entry_is_built_anew(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
pool().finish()
first, second, third = (path.parent for path in sorted(ROOT.glob("*/*.cubin")))
code, digest = first / "_place_kernel.cubin", first / "_place_kernel.cubin.hmac"
good = code.read_bytes()

def exchanged():  # whole, with its digest, in the folder of another kernel
    for path in (code, digest):
        path.write_bytes((second / path.name).read_bytes())

def other_secret():
    triton_cache._secret.cache_clear()
    (ROOT / "key").write_bytes(bytes(32))

faults = {
    "truncated": lambda: code.write_bytes(good[:-100]),
    "altered": lambda: code.write_bytes(good[:-1] + bytes([good[-1] ^ 1])),
    "exchanged": exchanged,
    "no digest": digest.unlink,
    "no file": code.unlink,
    "by a user with another secret": other_secret,
}
for fault, harm in faults.items():
    harm()
    rebuilt = pool().finish()
    assert len(rebuilt) == (3 if harm is other_secret else 1), (fault, rebuilt)
    assert code.read_bytes() == good, fault
assert compilations() == 0
""",
        tmp_path / "cache",
    )


def test_a_stage_that_fails_or_a_process_that_is_killed_leaves_compiling_to_the_launch(
    tmp_path: Path,
) -> None:
    without_interpreter(
        POOL
        + """
failed = CompilePool(broken, GPU, 2)
failed.wait("KEY")
assert [kernel.error for kernel in failed.finish()] == ["ValueError: no such shape"]
killed = stopped(SIZES[1:])  # the first one is crashed below
os.kill(killed._process.pid, signal.SIGKILL)
killed.wait("KEY")
killed.finish()
assert not killed.complete
launcher_of, compile_processes.launcher_of = compile_processes.launcher_of, lambda _: os._exit(1)
crashed = pool((1,), processes=1)
assert [kernel.error for kernel in crashed.finish()] == [CRASHED]
compile_processes.launcher_of = launcher_of
assert compilations() <= len(SIZES) and compilations() == 0
""",
        tmp_path / "cache",
    )


def test_the_processes_end_with_the_one_that_they_compile_for(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
sizes = (1, 2, 4, 8, 16, 64)
ahead = stopped(sizes)
ahead._process.channel.close()  # as at its end
os.kill(ahead._process.pid, signal.SIGCONT)
os.waitpid(ahead._process.pid, 0)
triton_cache.when_missing.clear()
assert compilations(sizes) > 0
""",
        tmp_path / "cache",
    )


def test_the_wait_is_shown_with_numbers(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
compile_ahead._SHOWN_AFTER = 0.0
lines = []
pool(progress=lines.append).finish()
assert "compiling kernels for GPU X: 2 of 3" in lines and lines[-1] == "", lines
""",
        tmp_path / "cache",
    )


def test_a_marker_lies_in_the_cache_and_names_what_it_was_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    one = compiled_marker("GPU X", (4096, 32))
    assert one.parent == tmp_path
    assert one == compiled_marker("GPU X", (4096, 32))
    assert len({one, compiled_marker("GPU Y", (4096, 32)), compiled_marker("GPU X", (4096, 33))}) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_launch_on_the_gpu_finds_what_was_recorded_without_it(tmp_path: Path) -> None:
    without_interpreter(
        POOL
        + """
from quengine.kernels.cuda.launch.gpu import gpu_of
device = torch.device("cuda", 0)
GPU = gpu_of(device)
batch_rows._ENTRIES = 32
assert len(pool((32,)).finish()) == 1
misses = []
triton.knobs.compilation.listener = lambda *, cache_hit, **_: misses.append(not cache_hit)
newest = torch.tensor([3, -1, 5], device=device)
zeros = torch.zeros(3, dtype=torch.int32, device=device)
given, slots = zeros - 1, torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
tokens, tables = torch.zeros_like(newest), torch.ones(1, 3, 1, dtype=torch.int32, device=device)
inputs = batch_rows.RowInputs(tokens, zeros.clone(), torch.zeros_like(tables))
chosen = batch_rows.ChosenTokens(newest.view(1, -1), zeros[:1])
batch_rows.place_rows(
    batch_rows.StepRows(slots, slots, given, zeros), batch_rows.SlotTables(newest, zeros, tables), inputs, chosen, 3
)
assert misses == [False] and tokens.tolist() == [5, 0, 3] and inputs.tables.tolist() == [[[1], [1], [1]]]
""",
        tmp_path / "cache",
    )


def test_an_idle_process_that_was_killed_costs_the_next_kernel_alone() -> None:
    order = Order(b"", Gpu("", (9, 0)), processes=1, every=False, marker=None, cache="")
    silent, other_end = socket.socketpair()
    with silent, other_end:
        requester = Mock(fileno=silent.fileno)
        leader = compile_processes._Leader(requester, order)
        ended = compile_processes._Worker(*compile_processes._fork(lambda _: None), known=1)
        os.waitid(os.P_PID, ended.process, os.WEXITED | os.WNOWAIT)
        kernel = Mock(key="KEY")
        kernel.name = "norm_kernel"
        leader._idle, leader._waiting = [ended], {kernel: 0}
        leader._hand_out()
        leader._take_reports(None)
    requester.send.assert_called_once_with(Built("KEY", "norm_kernel", None, CRASHED))
    assert not leader._idle and not leader._busy
