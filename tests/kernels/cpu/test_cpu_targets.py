"""The CPU kernels on processors without AVX-512: what can run here runs, what cannot is compiled."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

AARCH64 = 183  # ELF e_machine


def run(folder: Path | None, *arguments: str, **environment: str) -> str:
    """Runs tests/kernels/cpu/cpu_target.py, with its compiled code in `folder`; None: with that of all tests, where
    each target and source has its own, and is compiled once on this machine."""
    command = [sys.executable, "-m", "tests.kernels.cpu.cpu_target", *arguments]
    variables = os.environ | ({} if folder is None else {"NUMBA_CACHE_DIR": str(folder)}) | environment
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 levels")
@pytest.mark.parametrize(
    ("name", "features", "tile"),
    [
        ("x86-64-v3", "+avx,+avx2,+fma,+f16c", "8 lanes, 2 x 6 accumulators"),
        ("x86-64", "+sse2", "4 lanes, 2 x 6 accumulators"),
    ],
)
def test_kernels_hold_on_older_x86(name: str, features: str, tile: str) -> None:
    out = run(None, "check", NUMBA_CPU_NAME=name, NUMBA_CPU_FEATURES=features)
    assert out.strip() == tile


def test_kernels_compile_for_arm(tmp_path: Path) -> None:
    out = run(tmp_path, "object", "aarch64-linux-gnu", "neoverse-n1")
    assert out.startswith("4 lanes, 4 x 6 accumulators\n")
    assert out.strip().endswith(f"machine [{AARCH64}]")
