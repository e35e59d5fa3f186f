"""The CPU thread team, and compiled code on other CPUs."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from quengine.errors import EngineError
from quengine.kernels.backend import AttentionSpec, KVLayer
from quengine.kernels.cpu import (
    get_threads,
    glu,
    joined,
    max_threads,
    prompt_linear,
    rms_norm,
    rope_store,
    set_threads,
)
from quengine.kernels.cpu.ops.add import add_launch
from quengine.kernels.cpu.rows import add_to_rows, place_rows, taken_rows
from quengine.kernels.cpu.runtime import threads as team_threads
from quengine.kernels.cpu.runtime.threads import Program
from quengine.kernels.cpu.runtime.threads import _Team as Team
from quengine.kernels.cpu.step_recorder import CpuWeight, recorded
from quengine.kernels.embedded_rows import EmbeddedRows, place_embeddings
from quengine.kernels.plain_rows import PlainRows
from tests.forward import one_sequence
from tests.kernels.cpu.cpu_runs import STEP, attend_token, embed, linear
from tests.kernels.weights import random_weight
from tests.quick_python import run


def test_threads_are_set_for_kernels_and_torch() -> None:
    for threads in (1, max_threads()):
        set_threads(threads)
        assert get_threads() == threads and torch.get_num_threads() == threads


@pytest.mark.parametrize("threads", [0, -1, max_threads() + 1])
def test_threads_out_of_range_are_refused(threads: int) -> None:
    with pytest.raises(EngineError, match=f"1 to {max_threads()}"):
        set_threads(threads)


def test_a_list_runs_in_order_many_times() -> None:
    # y = W2 (W1 x): the second matmul must see the first one's result, every time.
    first, second = random_weight("Q8_0", 64, 3), random_weight("Q4_0", 128, 2)
    x = torch.randn(1, first.cols, generator=torch.Generator().manual_seed(0))
    expected = linear(linear(x, [first]), [second])
    for _ in range(300):
        with recorded(STEP, 1) as step:
            between = step.norm_linear(x, None, CpuWeight((first,)), None)
            y = step.norm_linear(between, None, CpuWeight((second,)), None)
        assert torch.equal(y, expected)


def test_joined_operations_run_as_one_list() -> None:
    gate_up, down = random_weight("Q4_K", 64, 1), random_weight("Q8_0", 40, 1)
    x = torch.randn(9, gate_up.cols, generator=torch.Generator().manual_seed(0))
    expected = prompt_linear(glu(prompt_linear(x, [gate_up])), [down])
    with joined():
        with joined():
            between = glu(prompt_linear(x, [gate_up]))
        y = prompt_linear(between, [down], y=torch.zeros(9, 40))
        assert not y.any()
    assert torch.equal(y, expected)
    with pytest.raises(ZeroDivisionError), joined():
        prompt_linear(x, [gate_up], y=torch.zeros(9, 64))
        _ = 1 // 0
    assert torch.equal(prompt_linear(between, [down]), expected)


def test_a_thread_does_not_sleep_through_a_list_announced_while_it_stopped_watching() -> None:
    """A list that it slept through was computed by the others alone, and took so much longer."""
    team = Team(1)
    assert team.goes_to_sleep(known=0)
    team.announce()  # rings for it
    assert team.bell.acquire(blocking=False) and team.asleep == 0
    team.announce()
    assert not team.goes_to_sleep(known=1), "it has not looked for list 2"
    assert team.goes_to_sleep(known=2) and team.asleep == 1


def test_threads_that_sleep_between_lists_work_on_each_of_them() -> None:
    """However long the pause: as a thread falls asleep, while it watches, and long after."""
    set_threads(max_threads())
    weight = random_weight("Q8_0", 256, 8)
    x = torch.randn(1, weight.cols, generator=torch.Generator().manual_seed(0))
    expected = linear(x, [weight])
    for number in range(60):
        time.sleep(number % 12 * 5e-4)
        assert torch.equal(linear(x, [weight]), expected)


def test_tasks_of_threads_that_do_not_come_are_done_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    w = random_weight("Q8_0", 300, 3)
    x = torch.randn(3, w.cols, generator=torch.Generator().manual_seed(0))
    expected = linear(x, [w])
    monkeypatch.setattr(team_threads.Thread, "start", lambda _: None)  # as if the system never ran them
    team = Team(5)
    monkeypatch.setattr(team_threads, "_team", team)
    assert torch.equal(linear(x, [w]), expected)
    assert len(team.counters) > 0


@pytest.mark.parametrize("threads", [2, 7])
def test_every_task_runs_once_in_every_run(monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Also with more threads than CPUs, for longer and shorter lists in turn, and whatever is prefetched."""
    team = Team(threads)
    monkeypatch.setattr(team_threads, "_team", team)
    one, runs = torch.ones(1, 331), 40
    counted, programs = list[torch.Tensor](), list[Program]()
    for length in (2, 40, 3):
        rows = torch.zeros(length // 2 + 1, 1, 331)
        launches = [
            add_launch(rows[i // 2], one, 0, 331, (1, 7, 50, 331)[i % 4])._replace(
                after_previous=i % 2 == 1 or i % 3 == 0, weights=i % 5 * 8, task_bytes=i % 4 * 100_000
            )
            for i in range(2 * len(rows))
        ]
        counted.append(rows)
        programs.append(Program(launches))
    for number in range(runs):
        for program in programs:
            program.run()
        time.sleep(number % 4 * 1e-3)
    team.dismiss()
    for rows in counted:
        assert (rows == 2 * runs).all()


def test_several_python_threads_may_ask_at_once() -> None:
    w = random_weight("Q4_1", 200, 4)
    x = torch.randn(8, w.cols, generator=torch.Generator().manual_seed(0))
    expected = linear(x, [w])
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda i: linear(x[i % 8].unsqueeze(0), [w]), range(200)))
    for i, row in enumerate(rows):
        assert torch.equal(row[0], expected[i % 8])


def test_the_team_changes_size_while_idle() -> None:
    w = random_weight("Q4_1", 64, 4)
    x = torch.randn(1, w.cols, generator=torch.Generator().manual_seed(0))
    expected = linear(x, [w])
    for threads in (1, max_threads()) * 10:
        set_threads(threads)
        assert torch.equal(linear(x, [w]), expected)


def results() -> str:
    """The bits that the kernels of a decode step give on this CPU, four kinds of matmul among them."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for name, blocks in (("Q4_1", 5), ("Q4_K", 2), ("Q6_K", 2), ("F16", 70)):
        w = random_weight(name, 5, blocks)
        tensors += [linear(torch.randn(1, w.cols, generator=generator), [w]), embed(w, torch.arange(5))]
    k = torch.randn(40, 1, 32, generator=generator).half()
    tensors.append(attend_token(torch.randn(2, 32, generator=generator), KVLayer(k, k), 40, 0.2))
    x = torch.randn(2, 4 * 32, generator=generator)
    tensors += [rms_norm(x, x[0], 1e-6), glu(x)]
    x[0, 100:108] = torch.tensor([1e-7, 2e-6, 6e-5, 65519.9, 65520.0, 1.00048828125, 1.00146484375, -1e-9])
    cos, sin = torch.randn(2, 8, 16, generator=generator)
    spec = AttentionSpec(2, 1, 32, 1.0, None, "halves", cos, sin, torch.ones(0))
    layer = KVLayer(*torch.zeros(2, 32, 1, 32, dtype=torch.float16))
    batch = one_sequence([0, 0], 3, blocks=1)
    tensors += [rope_store(x.clone(), spec, layer, batch).contiguous(), layer.k.float(), layer.v.float()]
    return str([t.view(torch.int32).tolist() for t in tensors])


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="names x86 CPUs")
def test_a_cpu_without_vector_extensions_gives_the_same_bits() -> None:
    # x86-64 as of 2003: no F16C, no fused multiply-add, no AVX.
    script = "from tests.kernels.cpu.test_cpu_threads import results; print(results())"
    root = Path(__file__).parents[3]
    environment = {
        **os.environ,
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
    }
    done = run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=root, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == results()


@pytest.mark.skipif(sys.platform != "linux" or max_threads() < 2, reason="counts the threads of a process")
def test_torch_starts_no_threads_for_rows_of_a_prompt() -> None:
    """Those whose logits are wanted, and those of images."""
    script = """
import os, torch
from quengine.kernels.cpu.backend import CpuBackend
from quengine.kernels.cpu.rows import place_rows
from quengine.kernels.embedded_rows import EmbeddedRows
torch.set_num_threads(2)
x, rows, values = torch.empty(256, 4096), torch.arange(7, 207), torch.empty(200, 4096)
before = len(os.listdir("/proc/self/task"))
CpuBackend.gather_rows(None, x, rows)
CpuBackend.add_to_rows(None, x, rows, values)
place_rows(x, EmbeddedRows(rows, values))
print(len(os.listdir("/proc/self/task")) - before)
"""
    done = run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout.strip()) == (0, "0"), done.stderr


def test_rows_are_as_defined() -> None:
    torch.manual_seed(0)
    x, rows, values = torch.randn(9, 32), torch.tensor([7, 0, 3]), torch.randn(3, 32)
    defined = PlainRows()
    assert taken_rows(x, rows).equal(defined.gather_rows(x, rows))
    wanted = defined.add_to_rows(x, rows, values)
    add_to_rows(x, rows, values)
    assert x.equal(wanted)
    given = EmbeddedRows(torch.tensor([7, -1, 3]), values)
    place_rows(x, given)
    assert x.equal(place_embeddings(wanted, given)) and x[[7, 3]].equal(values[[0, 2]])
