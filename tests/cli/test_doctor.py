"""`engine doctor`: what it prints, and that a wrong kernel makes it exit with 2."""

import json
import re

import pytest

from quengine.cli.commands.doctor import print_table
from quengine.cli.main import run
from quengine.diagnostics.harness import KernelCheck
from quengine.diagnostics.selftest.self_test import USES
from quengine.diagnostics.selftest.self_test_attention import OPERATIONS, PAGED
from quengine.diagnostics.selftest.self_test_experts import ROUTER, SUBJECTS
from quengine.diagnostics.selftest.self_test_latent import LATENTS
from quengine.diagnostics.selftest.self_test_run import SAMPLING, check_cpu, units
from quengine.diagnostics.selftest.self_test_states import STATES
from quengine.diagnostics.selftest.self_test_vision import VISION
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.reference import ReferenceBackend
from quengine.parallel.sum_times import SumTime, SumTimes
from quengine.platform.machine import CudaDevice


@pytest.fixture
def kernels(monkeypatch):
    """Puts another backend in the place of the CPU one, and makes the bandwidth quick to measure."""
    monkeypatch.setattr("quengine.diagnostics.machine.memory_bandwidth", lambda _: 12.5e9)
    monkeypatch.setattr("quengine.diagnostics.machine.cuda_devices", list)

    def install(backend):
        monkeypatch.setattr("quengine.kernels.cpu.backend.CpuBackend", lambda _: backend)

    install(ReferenceBackend(keep=True))
    return install


@pytest.fixture(scope="module")
def every_check():
    """What the tests of all formats find; those of weights stand for themselves, test_self_test.py runs them."""

    def passed(_backend, name, use):
        return KernelCheck(name, use.name, 1e-12, 1e-8)

    with pytest.MonkeyPatch.context() as patch:
        for check in ("check_use", "check_experts"):
            patch.setattr(f"quengine.diagnostics.selftest.self_test_run.{check}", passed)
        patch.setattr("quengine.kernels.cpu.backend.CpuBackend", lambda _: ReferenceBackend(keep=True))
        return list(check_cpu(1))


@pytest.fixture
def all_formats(every_check, monkeypatch):
    monkeypatch.setattr("quengine.diagnostics.selftest.self_test_run.check_cpu", lambda *_: iter(every_check))


@pytest.fixture
def two_formats(monkeypatch):
    """Enough where a test is about one: all of them take seconds, and so do states and latent attention."""
    for others in ("STATES", "LATENTS"):
        monkeypatch.setattr(f"quengine.diagnostics.selftest.self_test_run.{others}", ())
    monkeypatch.setattr(
        "quengine.diagnostics.selftest.self_test_run.FORMATS",
        {name: FORMATS[name] for name in ("Q4_K", "Q8_0")},
    )
    monkeypatch.setattr(
        "quengine.diagnostics.selftest.self_test_run.SUBJECTS", ("experts Q4_K", "experts Q8_0")
    )


class WrongQ4K(ReferenceBackend):
    """Right, but for Q4_K weights, which it reads with the wrong scale."""

    def __init__(self, factor):
        super().__init__(keep=True)
        self.factor = factor

    def logits(self, batch, x, norm, weight):
        wrong = weight.parts[0].format.name == "Q4_K"
        return super().logits(batch, x, norm, weight) * (self.factor if wrong else 1)


@pytest.mark.usefixtures("kernels", "all_formats")
def test_json_has_the_machine_the_models_and_every_kernel(capsys):
    assert run(["doctor", "--json", "-t", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True
    assert found["memory_bandwidth"] == 12.5e9
    assert found["threads"] == 1
    # A column's width, or headings run together.
    assert max(len(kernel["test"]) for kernel in found["kernels"]) < 18
    assert 0 < found["available_memory"] <= found["total_memory"]
    assert found["physical_cores"] >= 1
    assert {"python", "quengine", "torch", "triton", "numba", "tokenizers"} <= set(found["versions"])
    assert isinstance(found["simd"], list) and isinstance(found["models"], list)
    checks = [(check["device"], check["subject"], check["test"]) for check in found["kernels"]]
    assert {("cpu", name, use.name) for name in FORMATS for use in USES} <= set(checks)
    assert {subject for _, subject, _ in checks} == {
        *FORMATS,
        *OPERATIONS,
        *STATES,
        *LATENTS,
        *SUBJECTS,
        ROUTER,
        VISION,
    }


@pytest.mark.usefixtures("kernels", "all_formats")
def test_the_report_for_people_names_every_format_and_the_verdict(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    labels = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {"versions", "cpu", "cores", "simd", "memory", "bandwidth", "cuda", "cache", "models"} <= labels
    assert set(FORMATS) <= labels and {"RMSNorm", "attention"} <= labels
    assert "12.5 GB/s" in text
    assert text.splitlines()[-1].startswith("all ") and " checks passed (" in text.splitlines()[-1]


@pytest.mark.usefixtures("two_formats")
def test_a_wrong_kernel_is_named_and_the_exit_code_is_2(kernels, capsys):
    kernels(WrongQ4K(1.01))
    assert run(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    failures = [line for line in lines if line.startswith("FAIL")]
    assert [line.split(":")[0] for line in failures] == [
        f"FAIL cpu Q4_K, {test}" for test in ("1 token", "5 tokens", "160 tokens")
    ]
    assert all("is over" in line for line in failures)
    assert lines[-1].startswith("3 of ") and "checks FAILED" in lines[-1]


@pytest.mark.usefixtures("two_formats")
def test_a_kernel_that_gives_nan_fails_and_json_stays_valid(kernels, capsys):
    kernels(WrongQ4K(float("nan")))
    assert run(["doctor", "--json"]) == 2
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["healthy"] is False
    failed = [check for check in found["kernels"] if not check["passed"]]
    assert {check["subject"] for check in failed} == {"Q4_K"}
    assert all(check["error"] is None for check in failed)


@pytest.mark.usefixtures("kernels", "all_formats")
def test_every_usable_gpu_is_tested_and_one_that_fails_is_named(monkeypatch, capsys):
    devices = [CudaDevice(index, "gpu", cc, 8 << 30, 7 << 30, 10) for index, cc in ((0, "8.9"), (1, "7.5"))]
    monkeypatch.setattr("quengine.diagnostics.machine.cuda_devices", lambda: devices)
    asked = []

    def check_cuda(index, free_memory, quick):
        assert not quick
        asked.append((index, free_memory))
        yield KernelCheck("Q8_0", "1 token", 1e-10, 1e-8)
        yield KernelCheck("sampling", "greedy", 0.5, 0.0)

    monkeypatch.setattr("quengine.diagnostics.selftest.self_test_run.check_cuda", check_cuda)
    assert run(["doctor"]) == 2
    out = capsys.readouterr().out
    assert asked == [(0, 7 << 30)]
    assert "FAIL cuda:0 sampling, greedy: error 5.0e-01 is over 0e+00" in out


def test_names_of_tests_stand_apart_above_their_results(capsys):
    names = ["softmax, 1", "of the chosen, 160", "sigmoid, bias, 1"]
    print_table("cpu", [KernelCheck("router", name, 1e-15, 1e-10) for name in names])
    head, row = capsys.readouterr().out.splitlines()[:2]
    assert re.split(" {2,}", head.strip()) == names and len(head) == len(row)
    assert all(row[: head.index(name) + len(name)].endswith("ok") for name in names)


@pytest.mark.usefixtures("kernels", "all_formats")
@pytest.mark.parametrize("problem", ["", "the devices cannot meet"])
def test_several_gpus_are_shown_with_the_time_of_a_sum(capsys, monkeypatch, problem):
    devices = [CudaDevice(index, "GPU", "7.5", 1 << 30, 1 << 30, 1) for index in range(2)]
    times = SumTimes(2, "sums over peer memory", (SumTime(1, 4096, 3.5e-6),), problem)
    monkeypatch.setattr("quengine.diagnostics.machine.cuda_devices", lambda: devices)
    monkeypatch.setattr("quengine.diagnostics.machine.MIN_CAPABILITY", (7, 0))
    monkeypatch.setattr("quengine.diagnostics.machine.measure", lambda *_: times)
    assert run(["doctor", "-t", "1"]) == 0
    shown = problem or "2 GPUs, sums over peer memory: 1 x 4096 in 3.5 us"
    assert f"{shown}\n" in capsys.readouterr().out


@pytest.mark.usefixtures("kernels")
def test_quick_is_one_check_of_a_kind(capsys):
    assert run(["doctor", "--quick", "--json", "-t", "1"]) == 0
    checks = json.loads(capsys.readouterr().out)["kernels"]
    subjects = [check["subject"] for check in checks]
    assert set(subjects) == {"Q4_K", *OPERATIONS, *STATES, *LATENTS, "experts Q4_K", ROUTER, VISION}
    assert [check["test"] for check in checks if check["subject"] == "Q4_K"] == [use.name for use in USES]
    quick = units(on_gpu=True, quick=True)
    assert len(quick) < len(units(on_gpu=True)) / 4
    assert {subject for subject, _ in quick} == {*subjects, *PAGED, SAMPLING}


def test_the_table_fits_a_terminal_of_80_columns(capsys):
    tests = [use.name for use in USES]
    checks = [KernelCheck(name, test, 2e-10, 1e-8) for name in ("Q4_K", "Q8_0") for test in tests]
    checks += [KernelCheck("Q5_K", test, 1e-3 if test == "1 token" else 1e-10, 1e-8) for test in tests]
    print_table("cpu", checks, 80)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.match(r"Q4_K +7 ok, largest error 2\.0e-10$", lines[0]) and "1 of 7 FAIL" in lines[2]
    assert "FAIL cpu Q5_K, 1 token: error 1.0e-03 is over 1e-08" in lines
