"""Rates of the CPU's matmuls alone: prompts in fp32 and, where there are any, on AMX tiles; decode's row dots.

    python benchmarks/cpu/cpu_matmul.py [-t 2] [-T 1 16 128 512] [-b 1 8 16] [-r 15]

GMAC/s, the best of some samples: a busy machine disturbs those least. Weights of a prompt are unpacked for every call.
In decode matrices of 64 rows stay in the caches, those of 8192 or more do not. -T or -b without numbers leaves one out.
Ends with one JSON line.
"""

import argparse
import json
import time
from collections.abc import Sequence

import torch

from quengine.kernels import cpu
from quengine.kernels.block_formats import FORMATS
from quengine.kernels.cpu.gemm import tile_matmul
from quengine.kernels.cpu.gemm.amx import has_amx
from quengine.kernels.cpu.gemv import matmul
from quengine.kernels.cpu.gemv.quantized_rows import quantized_row_bytes
from quengine.kernels.cpu.runtime.threads import Launch, Program
from quengine.kernels.quant_tensor import QuantTensor
from quengine.platform.machine import cpu_model, physical_cores

PROMPT = [("Q4_K", 4096, 4096), ("Q6_K", 2048, 4096), ("Q4_1", 1536, 576), ("Q4_1", 576, 1536)]
DECODE = [
    *((name, 64, 4096) for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q4_0", "Q8_0")),
    ("Q4_K", 16384, 4096),
    ("Q6_K", 16384, 4096),
    ("Q4_K", 8192, 14336),
    ("Q6_K", 8192, 14336),
    ("Q4_1", 256, 576),
    ("Q4_1", 8192, 1536),
]
_ENOUGH = 3e7  # products of a sample of decode: short matrices are repeated


def weight(name: str, rows: int, cols: int) -> QuantTensor:
    """Chance bytes, with scales that are finite: only the time matters."""
    row_bytes = FORMATS[name].row_bytes(cols)
    data = torch.randint(
        0, 60, (rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    return QuantTensor(name, FORMATS[name], (rows, cols), data)


def best_seconds(launches: Sequence[Launch], samples: int) -> float:
    program, seconds = Program(launches), []
    program.run()
    for _ in range(samples):
        start = time.perf_counter()
        program.run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def prompt_rates(tokens: Sequence[int], samples: int) -> dict[str, float]:
    """GMAC/s by weight, unit and number of rows."""
    rates, has_unit = {}, has_amx()
    for name, rows, cols in PROMPT:
        w = weight(name, rows, cols)
        for count in tokens:
            x, y = torch.randn(count, cols), torch.empty(count, rows)
            for unit in (True, False) if has_unit else (False,):
                tile_matmul.has_amx = lambda unit=unit: unit  # type: ignore[assignment]
                seconds = best_seconds(tile_matmul.tile_matmul_launches(x, [w], y), samples)
                key = f"prompt {name} {rows}x{cols} {count} rows {'tiles' if unit else 'fp32'}"
                rates[key] = rows * cols * count / seconds / 1e9
    return rates


def decode_rates(counts: Sequence[int], samples: int) -> dict[str, float]:
    """GMAC/s by weight and number of rows of activations, and where rows are multiplied on tiles also without."""
    rates, on_tiles = {}, matmul.uses_amx_rows
    for name, rows, cols in DECODE:
        w = weight(name, rows, cols)
        for count in counts:
            x, y = torch.randn(count, cols), torch.empty(count, rows)
            records = torch.empty(count, quantized_row_bytes(cols), dtype=torch.uint8)
            times = max(1, int(_ENOUGH / (rows * cols * count)))
            for unit in (True, False) if on_tiles(w, count) else (False,):
                matmul.uses_amx_rows = lambda *_, unit=unit: unit  # type: ignore[assignment]
                dots = [matmul.matvec_launch(records, w, y, 0)] * times
                seconds = best_seconds([matmul.quantize_launch(x, records), *dots], samples)
                key = f"decode {name} {rows}x{cols} {count} rows{' tiles' * unit}"
                rates[key] = times * rows * cols * count / seconds / 1e9
    matmul.uses_amx_rows = on_tiles
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", type=int, default=physical_cores(), help="threads")
    parser.add_argument("-T", type=int, nargs="*", default=[1, 16, 128, 512], help="rows of a prompt")
    parser.add_argument("-b", type=int, nargs="*", default=[1, 8, 16], help="rows of a decode step")
    parser.add_argument("-r", type=int, default=15, help="samples")
    options = parser.parse_args()
    cpu.set_threads(options.t)
    rates = {**prompt_rates(options.T, options.r), **decode_rates(options.b, options.r)}
    for key, rate in rates.items():
        print(f"{key:44} {rate:8.1f} GMAC/s")
    facts = {"benchmark": "cpu_matmul", "cpu": cpu_model(), "threads": options.t, "tiles": has_amx()}
    print(json.dumps({**facts, "gmacs": rates}))


if __name__ == "__main__":
    main()
