"""`engine doctor`: what it prints, and that a wrong kernel makes it exit with 2."""

import json

import pytest

from quengine.cli.main import run
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.reference import ReferenceBackend
from quengine.self_test import PHASES


@pytest.fixture
def kernels(monkeypatch):
    """Puts another backend in the place of the CPU one, and makes the bandwidth quick to measure."""
    monkeypatch.setattr("quengine.doctor.memory_bandwidth", lambda _: 12.5e9)

    def install(backend):
        monkeypatch.setattr("quengine.kernels.cpu_backend.CpuBackend", lambda _: backend)

    install(ReferenceBackend(keep=True))
    return install


class WrongQ4K(ReferenceBackend):
    """Right, but for Q4_K weights, which it reads with the wrong scale."""

    def __init__(self, factor):
        super().__init__(keep=True)
        self.factor = factor

    def weight(self, parts):
        self.wrong = parts[0].format.name == "Q4_K"
        return super().weight(parts)

    def logits(self, x, norm, eps, weight, last_only):
        return super().logits(x, norm, eps, weight, last_only) * (self.factor if self.wrong else 1)


@pytest.mark.usefixtures("kernels")
def test_json_has_the_machine_the_models_and_every_kernel(capsys):
    assert run(["doctor", "--json", "-t", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] is True
    assert found["memory_bandwidth"] == 12.5e9
    assert found["threads"] == 1
    assert 0 < found["available_memory"] <= found["total_memory"]
    assert found["physical_cores"] >= 1
    assert {"python", "quengine", "torch", "triton", "numba", "tokenizers"} <= set(found["versions"])
    assert found["cuda"] == []
    assert isinstance(found["simd"], list) and isinstance(found["models"], list)
    checks = {(check["format"], check["phase"]) for check in found["kernels"]}
    assert checks == {(name, phase.name) for name in FORMATS for phase in PHASES}


@pytest.mark.usefixtures("kernels")
def test_the_report_for_people_names_every_format_and_the_verdict(capsys):
    assert run(["doctor"]) == 0
    text = capsys.readouterr().out
    labels = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {"versions", "cpu", "cores", "simd", "memory", "bandwidth", "cuda", "cache", "models"} <= labels
    assert set(FORMATS) <= labels
    assert "12.5 GB/s" in text
    assert text.splitlines()[-1] == f"all {len(FORMATS) * len(PHASES)} checks passed"


def test_a_wrong_kernel_is_named_and_the_exit_code_is_2(kernels, capsys):
    kernels(WrongQ4K(1.01))
    assert run(["doctor"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "FAIL" in line and "checks" not in line] == ["Q4_K"]
    assert lines[-1].startswith(f"{len(PHASES)} of ")


def test_a_kernel_that_gives_nan_fails_and_json_stays_valid(kernels, capsys):
    kernels(WrongQ4K(float("nan")))
    assert run(["doctor", "--json"]) == 2
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["healthy"] is False
    failed = [check for check in found["kernels"] if not check["passed"]]
    assert {check["format"] for check in failed} == {"Q4_K"}
    assert all(check["nmse"] is None for check in failed)
