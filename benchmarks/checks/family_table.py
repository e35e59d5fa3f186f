"""A table of the architectures: logits against `transformers`, and the product's files that name each.

    python -m benchmarks.checks.family_table [--files] [-k EXPRESSION]

Runs the tests of tests/models that compare tiny random models, folders and the files of llama.cpp's converter, with
`transformers` in fp64, and prints for each architecture how many comparisons there were and the largest NMSE; then the
files of the product that name the architecture or import its module. --files: these alone, without the tests, which
take some minutes. Exits with 1 if a test failed, or where an architecture has no comparison.
"""

import argparse
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from quengine.models.architectures import DECLARED
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.hf.hf_checkpoint import HFCheckpoint
from tests import transformers_models

ROOT = Path(__file__).parents[2]
ROOMS = ("cli", "engine", "kernels", "models")
_COMPARED = "reference_backend_has or are_those_of_transformers"
_TESTS = ("tests/models/architectures", "tests/models/hf/test_hf_vs_transformers.py")
_OF_FP64 = 1e-9
"""The tests' limit of logits in fp64; tests that compare a kernel's as well have other limits for those."""


class Compared:
    """A plugin of pytest that notes differences in fp64 by the architecture of the checkpoint opened last."""

    def __init__(self) -> None:
        self.differences: dict[str, list[float]] = defaultdict(list)
        self._opened = ""
        self._nmse = transformers_models.nmse
        transformers_models.nmse = self._noted
        for kind in (HFCheckpoint, GGUFCheckpoint):
            kind.__init__ = self._noting(kind.__init__)  # type: ignore[method-assign]

    def _noting(self, opens: Any) -> Any:
        def opened(checkpoint: Any, path: Path) -> None:
            opens(checkpoint, path)
            self._opened = checkpoint.config.architecture

        return opened

    def _noted(self, ours: torch.Tensor, theirs: torch.Tensor) -> float:
        difference = self._nmse(ours, theirs)
        if difference < _OF_FP64:
            self.differences[self._opened].append(difference)
        return difference


def files_naming(architecture: str) -> list[str]:
    """The product's files that have the architecture's name as a string, or import the module that declares it."""
    module = next(
        path
        for path in sorted((ROOT / "models/architectures").glob("*.py"))
        if re.search(rf'name="{re.escape(architecture)}"', path.read_text())
    )
    named = re.compile(rf'["\']{re.escape(architecture)}["\']|architectures\.{module.stem} import')
    found = [module]
    for room in ROOMS:
        found += [
            path for path in sorted((ROOT / room).rglob("*.py"))
            if path != module and named.search(path.read_text())
        ]  # fmt: skip
    return [str(path.relative_to(ROOT)) for path in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true")
    parser.add_argument("-k", default=_COMPARED)
    args = parser.parse_args()
    code, differences = 0, dict[str, list[float]]()
    if not args.files:
        compared = Compared()
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", args.k, *_TESTS], [compared])
        differences = compared.differences
    print("\n| architecture | comparisons | worst NMSE | files that name it |\n|---|---|---|---|")
    for name in DECLARED:
        found = differences.get(name, [])
        worst = f"{max(found):.0e}" if found else "-"
        print(f"| `{name}` | {len(found)} | {worst} | {', '.join(files_naming(name))} |")
    return int(code != 0 or (not args.files and any(name not in differences for name in DECLARED)))


if __name__ == "__main__":
    sys.exit(main())
