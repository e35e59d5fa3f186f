"""Decode's products of several rows on AMX tiles, where the processor has them; emulated ones in test_cpu_amx.py."""

import platform
import re
from pathlib import Path

import pytest
import torch

from quengine.kernels.cpu.gemm.amx_bytes import has_amx_bytes
from quengine.kernels.cpu.gemv import amx_rows
from quengine.kernels.cpu.gemv.amx_rows import LEAST_ROWS, ROWS, TYPES, uses_amx_rows
from quengine.kernels.cpu.gemv.matmul import MatvecArguments
from quengine.kernels.cpu.step_recorder import CpuWeight, recorded
from tests.kernels.cpu.cpu_runs import STEP, decode_linear
from tests.kernels.cpu.test_cpu_amx import SAPPHIRE_RAPIDS
from tests.kernels.cpu.test_cpu_targets import run as run_for_target
from tests.kernels.weights import randn, random_weight


@pytest.mark.parametrize("name", sorted(TYPES))
def test_few_rows_are_not_multiplied_on_tiles(name: str) -> None:
    assert not uses_amx_rows(random_weight(name, 16, 1), LEAST_ROWS - 1)


def test_other_types_are_not_multiplied_on_tiles() -> None:
    assert not uses_amx_rows(random_weight("Q6_K", 16, 1), 16)


def test_tasks_on_tiles_are_whole_panels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx_rows, "uses_amx_rows", lambda w, _: w.format.name in TYPES)
    weights = [random_weight(name, 200, 1) for name in ("Q4_K", "Q6_K")]
    x = randn(LEAST_ROWS, weights[0].cols)
    with recorded(STEP, len(x)) as step:
        y = step.norm_linear(x, None, CpuWeight(tuple(weights)), None)
    tiles = step.stages[-1].parts[0][0].arguments
    assert isinstance(tiles, MatvecArguments) and tiles.task_rows % ROWS == 0
    assert [amx_rows.whole_panels(w, LEAST_ROWS, 50) for w in weights] == [64, 50]
    assert torch.equal(y, torch.cat([decode_linear(x, [w]) for w in weights], 1))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="an x86 instruction set")
def test_the_products_compile_for_a_processor_with_tiles(tmp_path: Path) -> None:
    features = SAPPHIRE_RAPIDS["NUMBA_CPU_FEATURES"] + ",+avx512vnni,+amx-int8"
    out = run_for_target(tmp_path, "rows", **{**SAPPHIRE_RAPIDS, "NUMBA_CPU_FEATURES": features})
    counts = {name: int(count) for name, count in re.findall(r"(\w+) (\d+)", out)}
    # Eight groups of a super-block, of high and of low bytes.
    assert counts["tdpbssd"] == 16 and counts["ldtilecfg"] and counts["tilerelease"] == 1


@pytest.mark.skipif(not has_amx_bytes(), reason="no AMX tiles of bytes, or not allowed")
@pytest.mark.parametrize("name", sorted(TYPES))
@pytest.mark.parametrize(
    ("weight_rows", "blocks", "count"), [(16, 1, 8), (50, 3, 9), (300, 2, 16), (37, 1, 19)]
)
def test_rows_have_the_bits_of_a_step_of_their_own(
    name: str, weight_rows: int, blocks: int, count: int
) -> None:
    w = random_weight(name, weight_rows, blocks)
    x = randn(count, w.cols)
    x[1] = 0
    alone = torch.cat([decode_linear(row, [w]) for row in x.split(1)])
    assert uses_amx_rows(w, count)
    assert torch.equal(decode_linear(x, [w]), alone)
