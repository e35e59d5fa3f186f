"""How far inside their limit the CPU's kernels are on the models of tests/models/architectures, on this processor.

    python -m benchmarks.checks.architecture_margins [--variants] [granite glm4moe ...]

A line for each architecture: the worst NMSE over its cases and kinds of files, as a part of the limit, of prompts, of
single tokens, of the whole engine and of the reference backend that rounds as AMX does; and the least that a wrong
computation makes of it. Exit code 1 where less than IN_HAND is left. --variants does it again in processes for each
instruction set that this processor has: of numba's target, of OpenBLAS and of torch.
"""

import argparse
import importlib
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from llvmlite import binding

from tests.models.architectures import both_files as models

ARCHITECTURES = (
    *(
        "arcee",
        "cohere2",
        "dots1",
        "ernie4_5",
        "exaone4",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "glm4",
        "glm4moe",
    ),
    *("gpt_oss", "granite", "granite_hybrid", "hunyuan", "lfm2", "llama4", "minimax_m2", "mixtral"),
    *("nemotron_h", "olmo2", "olmoe", "openelm", "phi3", "qwen3_next", "qwen_moe", "qwen_vl", "seed_oss"),
    "smollm3",
)
COLUMNS = ("prompt", "decode", "engine", "AMX", "fault")

AVX2 = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c"}
AVX512 = {
    "NUMBA_CPU_NAME": "skylake-avx512",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512dq,+avx512vl,+avx512cd",
}
VARIANTS: tuple[dict[str, str], ...] = (
    AVX2,
    AVX512,
    {"OPENBLAS_CORETYPE": "Haswell", "ATEN_CPU_CAPABILITY": "default"},
    {"OPENBLAS_CORETYPE": "SkylakeX", "ATEN_CPU_CAPABILITY": "avx2"},
    {"OPENBLAS_CORETYPE": "SapphireRapids", "ATEN_CPU_CAPABILITY": "avx512"},
)


def differences(root: Path, module: Any) -> Iterator[tuple[str, str, float]]:
    """(column, case, NMSE as a part of the limit) of every computation of an architecture."""
    cases: dict[str, models.Case] = module.CASES
    tests: type[models.SameLogits] = module.TestLogits
    for name, case in cases.items():
        for kind in case.kinds:
            yield "prompt", name, models.cpu_difference(root, name, kind, case)
            yield "decode", name, models.cpu_difference(root, name, kind, case, decode=True)
        yield "AMX", name, models.amx_difference(root, name, "folder", case)
    for name in tests.main:
        for kind in tests.engine_kinds:
            for decode in (False, True):
                yield "engine", name, models.engine_difference(root, name, kind, cases[name], decode)
    name = tests.main[0]
    for fault in tests.faults:
        yield (
            "fault",
            name,
            models.cpu_difference(root, name, "folder", cases[name], fault=models.FAULTS[fault]),
        )


def table(architectures: Sequence[str]) -> bool:
    """Prints a line for each; whether all have IN_HAND in hand."""
    print(f"{'NMSE / limit':12}", *(f"{column:>9}" for column in COLUMNS), "  least in hand at", flush=True)
    passed = True
    for architecture in architectures:
        module = importlib.import_module(f"tests.models.architectures.test_{architecture}")
        with tempfile.TemporaryDirectory() as folder:
            write_cases = getattr(module, "write_cases", models.write_cases)  # not all are of `transformers`
            try:
                root = write_cases(Path(folder), module.CASES)
                found = [(c, name, d / models.CPU_TOLERANCE) for c, name, d in differences(root, module)]
            except (
                Exception
            ) as error:  # as where this machine's transformers is older: the others are still of use
                print(f"{architecture:12}  {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
                passed = False
                continue
        worst = {column: max(d for c, _, d in found if c == column) for column in COLUMNS[:-1]}
        fault = min(d for c, _, d in found if c == "fault")
        nearest = max((d, name, c) for c, name, d in found if c != "fault")
        passed &= nearest[0] * models.IN_HAND < 1 and fault > models.IN_HAND
        cells = (f"{value:9.1e}" for value in (*worst.values(), fault))
        print(f"{architecture:12}", *cells, f"  {nearest[1]}, {nearest[2]}", flush=True)
    return passed


def usable(variant: dict[str, str]) -> bool:
    """Whether this processor has what the variant asks for."""
    host = {name for name, has in binding.get_host_cpu_features().items() if has}
    asked = {name.lstrip("+") for name in variant.get("NUMBA_CPU_FEATURES", "").split(",") if name}
    wide = "SapphireRapids" in variant.values() or "SkylakeX" in variant.values()
    return platform.machine() == "x86_64" and (asked | ({"avx512f"} if wide else {"avx2"})) <= host


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("architectures", nargs="*", help=", ".join(ARCHITECTURES))
    given = parser.parse_args()
    passed = table(given.architectures or ARCHITECTURES)
    for variant in filter(usable, VARIANTS if given.variants else ()):
        print("\n" + " ".join(f"{key}={value}" for key, value in variant.items()), flush=True)
        command = [sys.executable, "-m", "benchmarks.checks.architecture_margins", *given.architectures]
        passed &= subprocess.run(command, env={**os.environ, **variant}, check=False).returncode == 0
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
