"""The CPU kernels on processors without AVX-512: on older ones of x86-64 they run, for Arm they are compiled."""

import os
import platform
import sys
from pathlib import Path

import pytest

from tests.quick_python import run as run_quickly

AARCH64 = 183  # ELF e_machine


def run(folder: Path, *arguments: str, **environment: str) -> str:
    """Runs tests/kernels/cpu/cpu_target.py, with its compiled code in `folder`."""
    command = [sys.executable, "-m", "tests.kernels.cpu.cpu_target", *arguments]
    variables = os.environ | {"NUMBA_CACHE_DIR": str(folder)} | environment
    root = Path(__file__).parents[3]
    done = run_quickly(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


OLDER = {
    "check": {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"},
    "tile": {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"},
}


@pytest.mark.timeout(900)  # a guard: all kernels are compiled twice, which takes minutes beside a load
@pytest.mark.parametrize(
    ("what", "tile"), [("check", "8 lanes, 2 x 6 accumulators"), ("tile", "4 lanes, 4 x 6 accumulators")]
)
def test_kernels_hold_on_older_x86_and_compile_for_arm(what: str, tile: str, tmp_path: Path) -> None:
    """All of them with AVX2; with SSE2 and Arm's tile those whose loops follow the tile. What has run is compiled for
    Arm, from the same code."""
    here = platform.machine() == "x86_64"
    out = run(tmp_path, what, "aarch64-linux-gnu", "neoverse-n1", **(OLDER[what] if here else {}))
    assert out.startswith(f"{tile}\n") or not here
    assert out.strip().endswith(f"machine [{AARCH64}]")
