"""Device time of choosing a token for 1 row and for 64: greedy, llama.cpp's defaults, with no top-k; two vocabularies.

python -m benchmarks.cuda.sampling [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch

from benchmarks.cuda.cuda_timing import launch_time
from quengine.kernels.cuda.backend import has_dependent_launch
from quengine.kernels.cuda.sampling.sampling import (
    DecodeState,
    SamplingBuffers,
    SamplingSettings,
    sample_step,
)

CASES = {
    "greedy": SamplingSettings(temperature=0.0, top_k=1),
    "defaults": SamplingSettings(),
    "top-k 128": SamplingSettings(top_k=128),
    "typical and penalties": SamplingSettings(typical_p=0.9, repeat=1.1, presence=0.1),
    "no top-k": SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
    "no top-k, top-p 0.95": SamplingSettings(temperature=0.8, top_k=0, top_p=0.95, min_p=0.0),
    "no top-k, min-p 0.05": SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.05),
    "no top-k, typical 0.9": SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=0.9),
    "no top-k, penalties": SamplingSettings(top_k=0, repeat=1.1, presence=0.1),
    "top-k 500": SamplingSettings(top_k=500),
}


def time_case(rows: int, vocab: int, settings: SamplingSettings, device: torch.device) -> float:
    """Microseconds a step; logits are normal with deviation 3."""
    logits = torch.randn(rows, vocab, device=device, generator=torch.Generator(device).manual_seed(1)) * 3
    state = DecodeState.allocate(rows, 1 << 12, device)
    buffers = SamplingBuffers.allocate(rows, vocab, settings.top_k, device, False, settings.penalizes)
    history = torch.tensor([1, 2, 3], dtype=torch.int32, device=device)
    for row in range(rows):
        buffers.set(row, settings, history, {})
    pdl = has_dependent_launch(device)
    return launch_time([lambda: sample_step(logits, state, buffers, pdl)] * 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    results = []
    for rows in (1, 64):
        for vocab in (32768, 151936):
            for name, settings in CASES.items():
                us = time_case(rows, vocab, settings, device)
                results.append({"rows": rows, "vocab": vocab, "case": name, "us": round(us, 2)})
                print(f"sampling {rows} x {vocab} {name}: {us:.2f} us", flush=True)
    report = {"device": torch.cuda.get_device_name(), "unit": "us", "results": results}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "sampling", "cases": len(results)}))


if __name__ == "__main__":
    main()
