"""The lines of functions, found without the tokenizer, are those that the tokenizer finds."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from quengine.kernels.cuda.launch import source_lines

ROOT = Path(source_lines.__file__).parents[1]


def definitions(path: Path) -> list[list[str]]:
    """The lines of a file from each decorator or definition in the first column on, as `inspect` passes them."""
    lines = path.read_text().splitlines(keepends=True)
    return [
        lines[n:] for n, line in enumerate(lines) if line.startswith(("def ", "@", "class ", "async def "))
    ]


def test_kernels_have_the_lines_that_the_tokenizer_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [each for path in sorted(ROOT.rglob("*.py")) for each in definitions(path)]
    expected = [source_lines._tokenized(each) for each in found]
    left: list[object] = []
    monkeypatch.setattr(
        source_lines, "_tokenized", lambda lines: left.append(lines) or inspect.getblock(lines)
    )
    assert [source_lines.block(each) for each in found] == expected
    assert len(found) > 500 and len(left) < len(found) // 4


def test_functions_of_other_modules_have_them_too() -> None:
    for module in (inspect, textwrap, subprocess, pytest):
        for each in definitions(Path(inspect.getfile(module))):
            assert source_lines.block(each) == source_lines._tokenized(each)


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    return 1\n\n# about g\ndef g(): pass\n",
        "def f():\n    a = 1\n# in the first column\n    return a\n",
        'def f():\n    return """\nfirst column\n"""\n\nx = 1\n',
        "def f():\n    return [\n1,\n]\n\nx = 1\n",
        "def f(a,\nb):\n    return a\n",
        "def f():\n    a = 1 + \\\n2\n    return a\n",
        "def f():\n    return 1\n\n  # less indented\nx = 1\n",
        "def f():\n    return 1\n    # the last line\n\n\nx = 1\n",
        "def f(): return 1\nx = 1\n",
        "@decorated(\n    1\n)\ndef f(\n    a,\n) -> int:\n    return 1\n",
        "def f():\n    return 1",
        "    def f(a):\n        return a\n\ndef f(a):\n    return a\n\nx = 1\n",
        "class A:\n    def f(self): pass\n\nx = 1\n",
    ],
)
def test_unusual_sources(source: str) -> None:
    lines = source.splitlines(keepends=True)
    assert source_lines.block(lines) == source_lines._tokenized(lines)


def test_triton_s_sources_are_the_same_in_a_process_of_the_program() -> None:
    """A kernel's key in Triton's cache follows from its source."""
    program = (
        "import hashlib\n"
        "from quengine.kernels.cuda import rms_norm, rms_norm_wgmma, flat_rows\n"
        "from triton.runtime.jit import JITCallable\n"
        "modules = vars(rms_norm) | vars(rms_norm_wgmma) | vars(flat_rows)\n"
        "found = {n: (f.src, f.cache_key) for n, f in modules.items() if isinstance(f, JITCallable)}\n"
        "assert len(found) > 5\n"
        "print(hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest())\n"
    )
    prelude = "from quengine.platform import torch_import; torch_import.prepare()\n"
    keys = [
        subprocess.run(
            [sys.executable, "-c", first + program], check=True, stdout=subprocess.PIPE,
            env={**os.environ, "TRITON_INTERPRET": "0"},
        ).stdout
        for first in ("", prelude)
    ]  # fmt: skip
    assert keys[0] == keys[1] != b""
