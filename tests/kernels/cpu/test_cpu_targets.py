"""The CPU kernels on processors without AVX-512: what can run here runs, what cannot is compiled."""

import os
import platform
import sys
from pathlib import Path

import pytest

from tests.quick_python import run as run_quickly

AARCH64 = 183  # ELF e_machine


def run(folder: Path | None, *arguments: str, **environment: str) -> str:
    """Runs tests/kernels/cpu/cpu_target.py, with its compiled code in `folder`; None: with that of all tests, where
    each target and source has its own, and is compiled once on this machine."""
    command = [sys.executable, "-m", "tests.kernels.cpu.cpu_target", *arguments]
    variables = os.environ | ({} if folder is None else {"NUMBA_CACHE_DIR": str(folder)}) | environment
    root = Path(__file__).parents[3]
    done = run_quickly(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 levels")
@pytest.mark.parametrize(
    ("what", "name", "features", "tile"),
    [
        ("check", "x86-64-v3", "+avx,+avx2,+fma,+f16c", "8 lanes, 2 x 6 accumulators"),
        ("tile", "x86-64", "+sse2", "4 lanes, 2 x 6 accumulators"),
    ],
)
def test_kernels_hold_on_older_x86(what: str, name: str, features: str, tile: str) -> None:
    """All of them with AVX2; of SSE2 those whose loops follow the tile, and the others below."""
    out = run(None, what, NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert out.strip() == tile


def test_kernels_compile_for_arm(tmp_path: Path) -> None:
    """What is compiled for Arm runs here too, on an x86-64 with its first instructions: SSE2."""
    oldest = {"NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": "+sse2"}
    variables = oldest if platform.machine() == "x86_64" else {}
    out = run(tmp_path, "object", "aarch64-linux-gnu", "neoverse-n1", **variables)
    assert out.startswith("4 lanes, 4 x 6 accumulators\n")
    assert out.strip().endswith(f"machine [{AARCH64}]")
