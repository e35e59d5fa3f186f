"""What `make` does, as far as it shows without doing it."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_first_demo_says_what_it_fetches_and_shows_how_far_it_is(tmp_path: Path) -> None:
    done = subprocess.run(
        ["make", "-n", "-C", str(ROOT), "demo", f"VENV={tmp_path / 'venv'}"],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    lines = done.stdout.splitlines()
    (install,) = [number for number, line in enumerate(lines) if line.endswith(" -e .")]
    assert "pip" in lines[install] and not {"-q", "--quiet"} & set(lines[install].split())
    assert "echo" in lines[install - 1] and "2.7 GB" in lines[install - 1]
