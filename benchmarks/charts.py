"""Draws the charts of the README and of docs/ from the figures in benchmarks/results.

    python -m benchmarks.charts            writes docs/pictures/{speed,quality,parity}-{light,dark}.svg

The same figures give the same bytes (tests/test_charts.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quengine.cli.charts import DARK, LIGHT, Bar, Cell, Chart, Row, svg

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


CHARTS: Mapping[str, tuple[str, Callable[[dict[str, Any]], Chart]]] = {
    "speed": ("h200_models.json", speed),
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
