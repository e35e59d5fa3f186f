"""Damaged files end in an EngineError or are read whole: no other exception, no hang, no large allocation.

A bounded number of cases; `python -m benchmarks.checks.fuzz_gguf` runs as many as asked for.
"""

import logging
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gguf_mutations import Mutator, read_everything


@pytest.fixture(scope="module")
def mutator():
    logging.getLogger("quengine").setLevel(logging.ERROR)
    yield Mutator()
    logging.getLogger("quengine").setLevel(logging.NOTSET)


def test_the_undamaged_files_are_read_whole(tmp_path, mutator):
    path = tmp_path / "seed.gguf"
    outcomes = []
    for seed in mutator.seeds:
        path.write_bytes(seed.assemble())
        outcomes.append(read_everything(path))
    # The last is a lone shard without an architecture; the one before has no tensors.
    assert outcomes == ["ok"] * (len(outcomes) - 2) + ["GGUFError"] * 2


def test_structure_aware_damage(tmp_path, mutator):
    path = tmp_path / "case.gguf"
    outcomes = {}
    for number in range(2000):
        path.write_bytes(mutator.case(number))
        outcome = read_everything(path)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    # A mutation that never gets past the header, or is never noticed, tests nothing.
    assert outcomes["ok"] > 200 and outcomes["GGUFError"] > 1000


def test_damage_never_makes_the_reader_allocate_much(tmp_path, mutator):
    path = tmp_path / "case.gguf"
    path.write_bytes(mutator.seeds[0].assemble())
    read_everything(path)
    tracemalloc.start()
    try:
        for number in range(3000, 3400):
            path.write_bytes(mutator.case(number))
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            read_everything(path)
            assert tracemalloc.get_traced_memory()[1] - before < 4 << 20, number
    finally:
        tracemalloc.stop()


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(tail=st.binary(max_size=200), version=st.sampled_from([2, 3]))
def test_noise_behind_a_good_magic(tmp_path, tail, version):
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + version.to_bytes(4, "little") + tail)
    read_everything(path)
