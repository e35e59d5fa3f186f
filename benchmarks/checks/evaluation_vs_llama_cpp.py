"""Perplexity, divergence and importances beside llama.cpp's tools, on the same file and text.

    python -m benchmarks.checks.evaluation_vs_llama_cpp BIN [-m smollm2-135m] [-f LICENSE] [-c 64] [--chunks 4]

BIN is a folder with llama-perplexity and llama-imatrix (targets of llama.cpp's CMake build). They get the model's
weights in F32, so that llama.cpp rounds no activations to 8 bits, and quengine the file as it is. The second model of
the divergence is Q4_0, made of the first. One line a value: theirs, ours, their ratio.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

import quengine
from quengine.models.hub.hub import resolve_model
from quengine.models.quantize.imatrix import read_sums


def tool(folder: Path, name: str, *words: object) -> str:
    """What a tool prints."""
    command = [str(folder / name), *map(str, words), "-t", "1"]
    run = subprocess.run(command, capture_output=True, text=True, env={"LD_LIBRARY_PATH": str(folder)})
    if run.returncode:
        raise SystemExit(f"{' '.join(command)}: {run.stderr[-500:]}")
    return run.stdout + run.stderr


def found(text: str, pattern: str) -> float:
    """The number in the last place of a pattern."""
    *_, value = re.findall(pattern + r"\s*:?\s*(-?[\d.]+)", text)
    return float(value)


def row(name: str, theirs: float, ours: float) -> None:
    print(f"{name:28} {theirs:14.6f} {ours:14.6f} {ours / theirs:10.6f}", flush=True)


def compare_importances(theirs: Path, ours: Path) -> None:
    """The distance of each tensor's sums, as a share of their norm."""
    a, b = read_sums(theirs).sums, read_sums(ours).sums
    assert a.keys() == b.keys(), sorted(a.keys() ^ b.keys())
    far = sorted(
        float(np.linalg.norm(b[name].squares - each.squares) / np.linalg.norm(each.squares))
        for name, each in a.items()
    )
    counts = sum(int(abs(b[name].counts - each.counts).sum()) for name, each in a.items())
    print(
        f"importances of {len(a)} tensors: distance at most {far[-1]:.1e}, median {far[len(far) // 2]:.1e}; "
        f"counts differ by {counts}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bin", type=Path)
    parser.add_argument("-m", "--model", default="smollm2-135m")
    parser.add_argument("-f", "--file", type=Path, default=Path("LICENSE"))
    parser.add_argument("-c", "--ctx", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=4)
    given = parser.parse_args()
    text = given.file.read_text().removesuffix("\n")
    sizes = ("-f", given.file, "-c", given.ctx, "-b", given.ctx, "--chunks", given.chunks)
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), resolve_model(given.model)
        a, b, q4_0 = (folder / f"{each}.gguf" for each in ("a", "b", "q4_0"))
        quengine.quantize(model, a, "F32", allow_requantize=True)
        quengine.quantize(model, q4_0, "Q4_0", allow_requantize=True)
        quengine.quantize(q4_0, b, "F32", allow_requantize=True)
        print(f"{'':28} {'llama.cpp':>14} {'quengine':>14} {'ratio':>10}")
        base = folder / "base.kld"
        said = tool(given.bin, "llama-perplexity", "-m", a, *sizes, "--kl-divergence-base", base)
        ours = quengine.perplexity(model, text, given.ctx, chunks=given.chunks, device="cpu")
        row("perplexity", found(said, "PPL ="), ours.perplexity.value)
        said = tool(
            *(given.bin, "llama-perplexity", "-m", b, "-c", given.ctx, "-b", given.ctx),
            *("--kl-divergence-base", base, "--kl-divergence"),
        )
        kl = quengine.compare(base, q4_0, device="cpu")
        row("perplexity of Q4_0", found(said, r"Mean PPL\(Q\)"), kl.perplexity_b.value)
        row("divergence, mean", found(said, "Mean +KLD"), kl.kl.value)
        row("divergence, median", found(said, "Median +KLD"), kl.kl_points["median"])
        row("divergence, 99%", found(said, "99.0% +KLD"), kl.kl_points["99%"])
        row("divergence, max", found(said, "Maximum KLD"), kl.kl_points["max"])
        row("change of p, RMS (%)", found(said, "RMS Δp"), 100 * kl.p_change_rms.value)
        row("same top token (%)", found(said, "Same top p"), 100 * kl.same_top.value)
        tool(given.bin, "llama-imatrix", "-m", a, *sizes, "-o", folder / "theirs.gguf")
        quengine.imatrix(model, text, folder / "ours.gguf", given.ctx, chunks=given.chunks, device="cpu")
        compare_importances(folder / "theirs.gguf", folder / "ours.gguf")


if __name__ == "__main__":
    main()
