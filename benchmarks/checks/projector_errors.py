"""A table of the projectors of images: preprocessing and features against `transformers`, on tiny random models.

    python -m benchmarks.checks.projector_errors [-k EXPRESSION]

Runs the tests of tests/models/vision that compare with `transformers` and prints for each projector how many pictures
were prepared alike to the bit, and the largest NMSE of an image's features, computed in fp64 and in fp32, of those read
from Hugging Face folders and from the files of llama.cpp's converter. Takes a minute; exits with 1 if a test failed.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.models.vision import vision_models

_COMPARED = "test_pixels or test_units or test_features"


@dataclass
class Projector:
    """What the tests of a projector's file measured."""

    prepared: int = 0
    failed: list[str] = field(default_factory=list)
    errors: dict[torch.dtype, list[float]] = field(default_factory=lambda: defaultdict(list))


class Measured:
    """A plugin of pytest that notes the errors of features, and the outcomes of tests, by file."""

    def __init__(self) -> None:
        self.projectors: dict[str, Projector] = defaultdict(Projector)
        self._file = ""
        self._nmse = vision_models.nmse
        vision_models.nmse = self._noted

    def _noted(self, ours: Tensor, theirs: Tensor) -> float:
        error = self._nmse(ours, theirs)
        self.projectors[self._file].errors[ours.dtype].append(error)
        return error

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._file = item.path.stem.removeprefix("test_")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.projectors[self._file]
        if report.failed:
            found.failed.append(report.nodeid)
        elif report.when == "call" and "test_features" not in report.nodeid:
            found.prepared += 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", default=_COMPARED)
    args = parser.parse_args()
    measured = Measured()
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", args.k, "tests/models/vision"], [measured])
    print("\n| tests of | prepared alike | features, fp64 | features, fp32 | images |\n|---|---|---|---|---|")
    for name, found in sorted(measured.projectors.items()):
        if not found.errors:
            continue
        worst = {kind: max(errors) for kind, errors in found.errors.items()}
        cells = [f"{worst[kind]:.1e}" if kind in worst else "-" for kind in (torch.float64, torch.float32)]
        images = len(found.errors[torch.float32])
        print(f"| {name} | {found.prepared} | {' | '.join(cells)} | {images} |")
        for test in found.failed:
            print(f"FAILED {test}")
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
