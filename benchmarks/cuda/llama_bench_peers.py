"""quengine and llama.cpp built for CUDA on the same synthetic files and GPU: prompts, generation, batches.

    python -m benchmarks.cuda.llama_bench_peers --llama FOLDER [--models glm-4.7-flash-8l nemotron-3-nano-13l]
        [-p 2048] [-n 64] [-b 8 32] [-r 2] [--folder /tmp] [--json FILE]

FOLDER has llama.cpp's programs llama-bench and, for batches, llama-batched-bench (ggml's CUDA backend, built for this
GPU). A model is a preset of `--synthetic`; NAME-8l has its first 8 layers, true in shape, so that a file is made in
seconds: the embedding and the output matrix then weigh more than in the whole model, on both sides alike. The peer runs
with all layers on the GPU and flash attention. Both sides time whole steps, the peer first; each figure is tokens a
second, and one JSON line ends the report.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from quengine.models.synthetic.synthetic import write_synthetic

MODELS = ("glm-4.7-flash-8l", "nemotron-3-nano-13l")
_BATCHED = 128
"""Tokens of a prompt, and of an answer, of each sequence of a batch."""


def model_file(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    if not path.is_file():
        write_synthetic(path, name)
    return path


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise SystemExit(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def peer(programs: Path, path: Path, options: argparse.Namespace) -> dict[str, float]:
    """llama.cpp's tokens a second by test: pp2048, tg64, b8 (generation)."""
    common = ["-m", str(path), "-ngl", "99", "-fa", "1"]
    sizes = ["-p", str(options.p), "-n", str(options.n), "-r", str(options.r)]
    rows = json.loads(run([str(programs / "llama-bench"), *common, *sizes, "-o", "json"]))
    found = {f"tg{row['n_gen']}" if row["n_gen"] else f"pp{row['n_prompt']}": row["avg_ts"] for row in rows}
    batched = programs / "llama-batched-bench"
    if options.b and batched.is_file():
        most = max(options.b)
        batch = ["-c", str(2 * _BATCHED * most), "-npp", str(_BATCHED), "-ntg", str(_BATCHED)]
        text = run([str(batched), *common, *batch, "-npl", ",".join(map(str, options.b)), "-b", "2048"])
        for row in re.findall(r"^\|(.+)\|$", text, re.MULTILINE):
            cells = [cell.strip() for cell in row.split("|")]  # PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S
            if len(cells) >= 8 and cells[2].isdigit():
                found[f"b{cells[2]}"] = float(cells[7])
    return found


def ours(path: Path, options: argparse.Namespace) -> dict[str, float]:
    """Results of this engine, each batch beside a prompt of its own."""
    command = [
        sys.executable,
        "-m",
        "quengine.cli",
        "bench",
        "-m",
        str(path),
        "--device",
        "cuda",
        "-o",
        "json",
    ]
    repeat = ["-r", str(options.r)]
    rows = json.loads(run([*command, "-p", str(options.p), "-n", str(options.n), *repeat]))
    if options.b:
        many = ",".join(map(str, options.b))
        rows += json.loads(
            run([*command, "-p", "0", "-n", str(_BATCHED), "-d", str(_BATCHED), "-b", many, *repeat])
        )
    return {row["test"].split()[0] if row["batch"] == 1 else f"b{row['batch']}": row["tok_s"] for row in rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--llama", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("-p", type=int, default=2048)
    parser.add_argument("-n", type=int, default=64)
    parser.add_argument("-b", type=int, nargs="*", default=[])
    parser.add_argument("-r", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.llama / "llama-bench").is_file():
        raise SystemExit(f"{options.llama}: no llama-bench there")
    report: dict[str, dict[str, Any]] = {}
    for name in options.models:
        path = model_file(options.folder, name)
        theirs, own = peer(options.llama, path, options), ours(path, options)
        report[name] = {"bytes": path.stat().st_size, "llama.cpp": theirs, "quengine": own}
        for test, rate in theirs.items():
            if test in own:
                print(
                    f"{name:24} {test:7} llama.cpp {rate:9.1f}  quengine {own[test]:9.1f}  {own[test] / rate:.2f}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"benchmark": "llama_bench_peers", **report}))


if __name__ == "__main__":
    main()
