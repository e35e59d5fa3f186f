"""Tokens a second with LoRA adapters beside a model's weights, by the number of adapters in a step and of sequences.

    python -m benchmarks.cuda.lora [--model mistral-7b-8l] [--rank 16] [--device cuda] [--sequences 1 8] [--json FILE]

The model and its adapters, of every projection of every layer, are random. Each line is a batch of prompts whose
sequences have no adapter, the first one, or one of four in turn; tokens a second are those of the whole batch after its
first tokens, the better of two rounds: kernels are compiled beside the first. The first lines are of an engine that was
loaded without adapters; the last figure of a line is how much longer a step takes than one without an adapter.
"""

import argparse
import json
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from quengine import LLM, SamplingParams
from quengine.models.gguf.gguf_checkpoint import GGUFCheckpoint
from quengine.models.gguf.writer import Field, TensorInfo, header_bytes, write_padding
from quengine.models.synthetic.synthetic import write_synthetic

STEMS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
ADAPTERS = 4
_ALIGNMENT = 32


def write_random_adapter(path: Path, checkpoint: GGUFCheckpoint, rank: int, seed: int) -> Path:
    """An adapter of F16 matrices, whose changes are small beside the weights."""
    draw = torch.Generator().manual_seed(seed)
    found = dict[str, torch.Tensor]()
    for name, held in checkpoint.tensors.items():
        if name.split(".")[-2] in STEMS:
            found[f"{name}.lora_a"] = torch.randn(rank, held.cols, generator=draw) * held.cols**-0.5
            found[f"{name}.lora_b"] = torch.randn(held.rows, rank, generator=draw) * (0.1 * rank**-0.5)
    fields = {
        "general.type": Field("string", "adapter"),
        "adapter.type": Field("string", "lora"),
        "general.architecture": Field("string", checkpoint.config.architecture),
        "adapter.lora.alpha": Field("float32", float(rank)),
    }
    infos = [TensorInfo(name, tuple(values.shape), "F16") for name, values in found.items()]
    with path.open("wb") as file:
        file.write(header_bytes(fields, infos, _ALIGNMENT))
        for info in infos:
            file.write(found[info.name].half().numpy().tobytes())
            write_padding(file, info.nbytes, _ALIGNMENT)
    return path


def tokens_a_second(llm: LLM, scales: Sequence[dict[int, float]], tokens: int) -> float:
    """Tokens a second of a batch of len(scales) sequences, once each has its first token; the better of two runs."""
    prompts = [[(37 * i + n) % 1000 + 3 for i in range(16)] for n in range(len(scales))]

    def run(count: int) -> float:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, lora=s) for s in scales]
        began = time.perf_counter()
        llm.generate(prompts, params)
        return time.perf_counter() - began

    run(8)
    short = min(run(2) for _ in range(2))
    whole = min(run(2 + tokens) for _ in range(2))
    return len(scales) * tokens / (whole - short)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="mistral-7b-8l")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = list[dict[str, float | str]]()
    options = {"device": given.device, "ctx_size": 256, "parallel": max(given.sequences)}
    with TemporaryDirectory() as folder:
        model = write_synthetic(Path(folder) / "model.gguf", given.model)
        checkpoint = GGUFCheckpoint(model)
        lora = [
            write_random_adapter(Path(folder) / f"{seed}.gguf", checkpoint, given.rank, seed)
            for seed in range(ADAPTERS)
        ]
        kinds: dict[str, list[dict[int, float]]] = {
            "none": [{}],
            "one": [{0: 1.0}],
            "four": [{number: 1.0} for number in range(ADAPTERS)],
        }
        best = dict[tuple[int, str], float]()
        for loaded, last in product((False, True), repeat=2):
            with LLM(model, lora=tuple(lora) if loaded else (), **options) as llm:
                shown = kinds if loaded else {"not loaded": kinds["none"]}
                for count, (kind, scales) in product(given.sequences, shown.items()):
                    each = [scales[n % len(scales)] for n in range(count)]
                    found = tokens_a_second(llm, each, given.tokens)
                    best[count, kind] = found = max(found, best.get((count, kind), 0.0))
                    if last:
                        rows.append({"adapters": kind, "sequences": count, "tok/s": round(found, 1)})
                        ratio = f"{best[count, 'none'] / found:8.3f}" if loaded else ""
                        print(f"{kind:>10} {count:4} sequences {found:10.1f} tok/s {ratio}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
