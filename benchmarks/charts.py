"""Draws the charts of the README and of docs/ from the figures in benchmarks/results.

    python -m benchmarks.charts            writes docs/pictures/speed-{light,dark}.svg

A row is one model and kind of work: two bars on a scale of the row's own, the longer one as wide as the column. The
same figures give the same bytes (tests/test_charts.py).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "h200_models.json"
PICTURES = ROOT / "docs" / "pictures"

WORK = {"one": "One sequence", "64": "64 sequences at once", "prompt": "Prompt of 2,048 tokens"}
"""Kinds of work and their columns, left to right."""

LEFT, COLUMN, GAP, TOP, ROW, BAR = 150, 236, 20, 84, 46, 13
"""Pixels: the models' names, a column and the space behind it, what stands above the rows, a row, a bar."""


@dataclass(frozen=True)
class Theme:
    """Colours of a picture: text, the lesser text, bars of quengine and of its peer."""

    text: str
    faint: str
    ours: str
    peer: str


THEMES = {
    "light": Theme(text="#1f2328", faint="#59636e", ours="#0969da", peer="#c4ccd4"),
    "dark": Theme(text="#f0f6fc", faint="#9198a1", ours="#4493f8", peer="#4a525c"),
}


def text(x: float, y: float, words: str, fill: str, size: int = 12, extra: str = "") -> str:
    """A line of text whose baseline is at `y`."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{extra}>{escape(words)}</text>'


def bars(x: float, y: float, row: dict[str, Any], theme: Theme) -> Iterator[str]:
    """The two bars of a row with their figures, in a column that begins at `x`."""
    room = COLUMN - 86
    most = max(row["quengine"], row["llama.cpp"])
    for line, (name, fill) in enumerate((("quengine", theme.ours), ("llama.cpp", theme.peer))):
        top, width = y + line * (BAR + 2), room * row[name] / most
        yield f'<rect x="{x:g}" y="{top:g}" width="{width:.1f}" height="{BAR}" rx="2" fill="{fill}"/>'
        yield text(x + width + 5, top + 11, f"{row[name]:,.0f}", theme.text if line == 0 else theme.faint, 11)
    ratio = f"{row['quengine'] / row['llama.cpp']:.1f}x"
    anchor = ' text-anchor="end" font-weight="600"'
    yield text(x + COLUMN - 2, y + BAR + 5, ratio, theme.text, 12, anchor)


def head(width: int, results: dict[str, Any], theme: Theme) -> Iterator[str]:
    """The title, the legend and the columns' names."""
    yield text(0, 18, "Tokens a second, against llama.cpp", theme.text, 16, ' font-weight="600"')
    where = f"{results['machine']}, torch {results['torch']}, Triton {results['triton']}; {results['peer']}"
    yield text(0, 38, where, theme.faint)
    for x, name, fill in ((width - 160, "quengine", theme.ours), (width - 80, "llama.cpp", theme.peer)):
        yield f'<rect x="{x}" y="8" width="12" height="12" rx="2" fill="{fill}"/>'
        yield text(x + 17, 18, name, theme.text)
    for index, name in enumerate(WORK.values()):
        yield text(LEFT + index * (COLUMN + GAP), TOP - 14, name, theme.text, 12, ' font-weight="600"')


def chart(results: dict[str, Any], theme: Theme) -> str:
    """An SVG document of all models in the order of the figures."""
    rows: Sequence[dict[str, Any]] = results["rows"]
    models = list(dict.fromkeys((row["model"], row["types"]) for row in rows))
    width = LEFT + len(WORK) * (COLUMN + GAP) - GAP
    height = TOP + len(models) * ROW
    parts = list(head(width, results, theme))
    for line, (model, types) in enumerate(models):
        y = TOP + line * ROW
        parts += [text(0, y + 12, model, theme.text, 13), text(0, y + 27, types, theme.faint, 11)]
    for row in rows:
        line, column = models.index((row["model"], row["types"])), list(WORK).index(row["work"])
        parts += bars(LEFT + column * (COLUMN + GAP), TOP + line * ROW, row, theme)
    font = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""
    opened = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" {font}>'
    said = "<title>Tokens a second of quengine and of llama.cpp, by model and work</title>"
    return "\n".join([opened, said, *parts, "</svg>"]) + "\n"


def main() -> None:
    """Writes the pictures."""
    results = json.loads(RESULTS.read_text())
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, theme in THEMES.items():
        (PICTURES / f"speed-{name}.svg").write_text(chart(results, theme))


if __name__ == "__main__":
    main()
