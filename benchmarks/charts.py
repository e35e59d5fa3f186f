"""Draws the charts of the README and of docs/ from the figures in benchmarks/results.

    python -m benchmarks.charts            writes docs/pictures/{speed,quality,parity}-{light,dark}.svg

The same figures give the same bytes (tests/test_charts.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quengine.cli.charts import DARK, LIGHT, Bar, Cell, Chart, Row, svg
from quengine.cli.parity_page import error_bar

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURES = ROOT / "docs" / "pictures"
THEMES = {"light": LIGHT, "dark": DARK}

WORK = {"one": "One sequence", "64": "64 sequences at once", "prompt": "Prompt of 2,048 tokens"}
"""Kinds of work and their columns, left to right."""


def speed(results: dict[str, Any]) -> Chart:
    """All models in the order of the figures. A cell has two bars on a scale of its own, and the ratio."""
    found: Sequence[dict[str, Any]] = results["rows"]
    models = dict.fromkeys((row["model"], row["types"]) for row in found)
    cells = {(row["model"], row["types"], row["work"]): _beside(row) for row in found}
    return Chart(
        title="Tokens a second, against llama.cpp",
        about=f"{results['machine']}, torch {results['torch']}, Triton {results['triton']}; {results['peer']}",
        columns=tuple(WORK.values()),
        rows=[Row(*model, [cells.get((*model, work)) for work in WORK]) for model in models],
        series=("quengine", "llama.cpp"),
        said="Tokens a second of quengine and of llama.cpp, by model and work",
    )


def _beside(row: dict[str, Any]) -> Cell:
    most = max(row["quengine"], row["llama.cpp"])
    bars = [
        Bar(row[name] / most, f"{row[name]:,.0f}", series)
        for series, name in enumerate(("quengine", "llama.cpp"))
    ]
    return Cell(bars, f"{row['quengine'] / row['llama.cpp']:.1f}x")


def quality(results: dict[str, Any]) -> Chart:
    """A row for each type, by size: how far its predictions are from those of the file that it was made of."""
    most = max(row["kl"] for row in results["rows"])
    largest = max(row["bytes"] for row in results["rows"])
    rows = [
        Row(
            row["type"],
            f"perplexity {row['perplexity']:.2f}",
            [
                Cell([Bar(row["bytes"] / largest, f"{row['bytes'] / 1e6:.0f} MB", 1)]),
                Cell([Bar(row["kl"] / most, f"{row['kl']:.4f}")]),
                Cell([Bar(row["same_top"], f"{100 * row['same_top']:.1f}%", mark=1.0)]),
            ],
        )
        for row in results["rows"]
    ]
    about = f"{results['model']}, its file written in other types; {results['tokens']:,} tokens of {results['text']}"
    columns = ("Size of the file", "Mean divergence, nats", "Same most likely token")
    return Chart("Divergence from the file that it was made of", about, columns, rows)


def parity(results: dict[str, Any]) -> Chart:
    """A row for each run and phase: errors beside their budgets, in powers of ten."""
    names = ("nmse_median", "nmse_p99", "nmse_max", "cached_p99")
    rows = []
    for run in results["runs"]:
        for phase in run["phases"]:
            limits = (*phase["budget"], phase["budget"][1])
            values = zip((phase[name] for name in names), limits, strict=True)
            cells = [None if value is None else Cell([error_bar(value, limit)]) for value, limit in values]
            rows.append(Row(phase["phase"], run["sides"], cells))
    columns = ("NMSE, median", "NMSE, 99th percentile", "NMSE, largest", "Keys and values, p99")
    about = f"{results['model']}: error of logits in powers of ten; the line is the budget"
    return Chart("Errors beside their budgets", about, columns, rows)


CHARTS: Mapping[str, tuple[str, Callable[[dict[str, Any]], Chart]]] = {
    "speed": ("h200_models.json", speed),
    "quality": ("quality_smollm2.json", quality),
    "parity": ("parity_smollm2.json", parity),
}
"""Names of pictures: the file of their figures, and what draws them."""


def pictures() -> dict[str, str]:
    """File names in docs/pictures, and what is in them."""
    drawn = {
        name: draw(json.loads((RESULTS / file).read_text("utf-8"))) for name, (file, draw) in CHARTS.items()
    }
    return {
        f"{name}-{shade}.svg": svg(chart, theme)
        for name, chart in drawn.items()
        for shade, theme in THEMES.items()
    }


def main() -> None:
    """Writes the pictures."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
