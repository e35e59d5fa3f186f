"""Device time of choosing a token: greedy, llama.cpp's defaults, with penalties; two vocabularies.

python benchmarks/sampling.py [--json FILE]
"""

import argparse
import json
from pathlib import Path

import torch
from timing import graph_us

from quengine.kernels.cuda.sampling import DecodeState, SamplingBuffers, Settings, sample_step

CASES = {
    "greedy": Settings(temperature=0.0, top_k=1),
    "defaults": Settings(),
    "top-k 128": Settings(top_k=128),
    "typical and penalties": Settings(typical_p=0.9, repeat=1.1, presence=0.1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    results = []
    for vocab in (32768, 152064):
        logits = torch.randn(1, vocab, device=device) * 3
        for name, settings in CASES.items():
            state = DecodeState.allocate(1, 1 << 16, device)
            penalizes = settings.repeat != 1.0
            buffers = SamplingBuffers.allocate(1, vocab, settings.top_k, device, False, penalizes)
            buffers.set(0, settings, [1, 2, 3], {})
            us = graph_us([lambda: sample_step(logits, state, buffers)] * 16)  # noqa: B023
            results.append({"vocab": vocab, "case": name, "us": us})
            print(f"sampling {vocab} {name}: {us:.2f} us", flush=True)
    report = {"device": torch.cuda.get_device_name(), "unit": "us", "results": results}
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "sampling", "cases": len(results)}))


if __name__ == "__main__":
    main()
